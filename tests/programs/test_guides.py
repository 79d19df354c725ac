"""The tutorial and the guides, followed from their text alone, in an empty directory; every Python block runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.jobs.engine import run_source
from support.programs.pages import Reader, same, steps

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [  # of the README and of docs/, without its guides
    pytest.param(block, id=f"{page.stem} {number}")
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "__main__" not in block  # needs a separate file: test_quickstart.py
]


# Its guide, how many commands it has, what it needs besides. Notebooks and containers have files of their own.
GUIDES = [
    pytest.param("share-memory", 3, (), marks=pytest.mark.full),
    pytest.param("cleanrl", 3, ("gymnasium",), marks=pytest.mark.full),
    pytest.param("stable-baselines3", 1, ("stable_baselines3",), marks=pytest.mark.full),
    pytest.param("torchrl", 1, ("torchrl", "gymnasium"), marks=pytest.mark.full),
    pytest.param("ray", 4, ("ray", "gymnasium"), marks=pytest.mark.full),
    pytest.param("language-models", 2, ("transformers", "peft"), marks=pytest.mark.full),
    pytest.param("training-hangs", 4, (), marks=pytest.mark.full),
    pytest.param("dataloader", 2, (), marks=pytest.mark.full),
    pytest.param("leagues", 2, ("gymnasium", "pettingzoo", "pygame"), marks=pytest.mark.full),
    pytest.param("gpu-learner", 2, (), marks=pytest.mark.full),
    pytest.param("serving", 1, ("fastapi", "uvicorn"), marks=pytest.mark.full),
]


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")  # the commands are typed in a clone
    return Reader(tmp_path)


@pytest.mark.full  # `make test` runs the README's first example, in test_quickstart.py
def test_the_tutorial_prints_what_it_shows(reader):
    assert reader.follow(DOCS / "tutorial.md") == 5


@pytest.mark.parametrize(("name", "commands", "needed"), GUIDES)
def test_a_guide_prints_what_it_shows(reader, name, commands, needed):
    for module in needed:
        pytest.importorskip(module, reason=f"the guide needs {module}, which shmsync[test] brings")
    page = DOCS / "guides" / f"{name}.md"
    if "\n$ patch " in page.read_text() and not shutil.which("patch"):
        pytest.skip("the guide needs patch: apt install patch")
    assert reader.follow(page) == commands


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs_as_it_stands(start, block):
    start().call(run_source, block)


def test_the_guide_to_leagues_shows_its_examples_as_they_are():
    page = (DOCS / "guides" / "leagues.md").read_text()
    programs = "".join((DOCS.parent / "examples" / name).read_text() for name in ("self_play.py", "population.py"))
    shown = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        assert block in programs


def test_every_guide_is_followed_by_a_test():
    elsewhere = {"notebooks", "containers"}
    followed = {getattr(each, "values", each)[0] for each in GUIDES} | elsewhere
    assert {page.stem for page in (DOCS / "guides").glob("*.md")} == followed


def test_another_output_would_be_noticed(reader, tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint(1, 2)\n```\n\n```console\n$ python a.py\n1 3\n```\n')
    with pytest.raises(AssertionError, match="but the page shows"):
        reader.follow(page)
    assert len(steps(page)) == 2
    assert same("1 ...\n", "1 2\n", loose=False) and same("1 3.5\n", "1 2\n", loose=True)
    assert not same("1 3\n", "1 2\n", loose=False) and not same("1 3\n", "one 3\n", loose=True)
