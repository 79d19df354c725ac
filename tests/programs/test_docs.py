"""What the README shows is what examples/ has, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readmes_first_example_is_the_quickstart():
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert block.group(1) == (ROOT / "examples" / "quickstart.py").read_text()


def test_every_local_link_of_the_docs_resolves():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_how_long_the_tests_take_stands_in_contributing_alone():
    said = re.compile(r"(make (quick|test(-pairs|-all)?)(?!-)\b|\.ci/run).*\b(\d+|an?|some) (min|minutes|hours?)\b")
    assert said.search((ROOT / "CONTRIBUTING.md").read_text().replace("` |", "")) is not None
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "adr"]  # those say what was so once
    for page in [ROOT / "README.md", ROOT / "tests" / "README.md", *pages]:
        assert [line for line in page.read_text().splitlines() if said.search(line)] == [], page.name


def test_the_page_on_transports_shows_parts_of_its_example():
    program = (ROOT / "examples" / "socket_transport.py").read_text()
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "add-a-transport.md").read_text(), re.DOTALL)
    assert blocks
    assert [block for block in blocks if block not in program] == []
