"""The tutorial and the guides, followed from their text alone, in an empty directory; every Python block runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.jobs.engine import run_source
from support.programs.pages import Reader

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [  # of the README and of docs/, without its guides
    pytest.param(block, id=f"{page.stem} {number}")
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "__main__" not in block  # needs a separate file: test_quickstart.py
]
PAGES = {  # how many commands it has, and what it needs besides. Notebooks and containers have files of their own.
    "tutorial": (5, ()),
    "guides/share-memory": (3, ()),
    "guides/cleanrl": (1, ("gymnasium",)),
    "guides/stable-baselines3": (1, ("stable_baselines3",)),
    "guides/torchrl": (1, ("torchrl", "gymnasium")),
    "guides/ray": (1, ("ray", "gymnasium")),
    "guides/language-models": (2, ("transformers", "peft")),
    "guides/training-hangs": (1, ()),
    "guides/dataloader": (1, ()),
    "guides/leagues": (1, ("gymnasium", "pettingzoo", "pygame")),
    "guides/serving": (1, ("fastapi", "uvicorn")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_shows(tmp_path, name):
    commands, needed = PAGES[name]
    for module in needed:
        pytest.importorskip(module, reason=f"the guide needs {module}, which shmsync[test] brings")
    page = DOCS / f"{name}.md"
    if "\n$ patch " in page.read_text() and not shutil.which("patch"):
        pytest.skip("the guide needs patch: apt install patch")
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")  # the commands are typed in a clone
    assert Reader(tmp_path).follow(page) == commands


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs_as_it_stands(start, block):
    start().call(run_source, block)
