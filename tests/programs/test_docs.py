"""What the README and the pages show is what examples/ has, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "program"),
    [("README.md", "examples/quickstart.py"), ("tests/README.md", "tests/engine/versions/test_example.py")],
)
def test_a_readmes_first_example_is_a_program_that_runs(page, program):
    block = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block is not None
    assert block.group(1) == (ROOT / program).read_text()


def test_every_local_link_of_the_docs_resolves():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("page", "section", "programs"),
    [
        ("schemes.md", "## A transport of your own", ["socket_transport.py"]),
        ("guides/leagues.md", "", ["self_play.py", "population.py"]),
    ],
)
def test_a_page_shows_parts_of_its_examples(page, section, programs):
    text = "".join((ROOT / "examples" / name).read_text() for name in programs)
    shown = (ROOT / "docs" / page).read_text().partition(section)[2] if section else (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"```py\n(.*?)```", shown, re.DOTALL)
    assert blocks and [block for block in blocks if block not in text] == []
