"""Publisher and Subscriber show the names that the documentation has, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
KINDS = {"Publisher": "pub", "Subscriber": "sub"}
BESIDE = {"name"}  # a Subscriber has it as a Publisher does


def in_the_table(kind):
    """The names in the first column of the table of docs/api.md whose first row is the constructor."""
    lines = (ROOT / "docs" / "api.md").read_text().split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| `{kind}("))
    rows = [line for line in lines[start : lines.index("", start)] if line.startswith("|")]
    spans = [span for row in rows for span in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return {re.match(r"\w+", span)[0] for span in spans} - {kind}


def in_the_pages(kind):
    """The names that programs and sentences use: `sub.latest`."""
    return {name for page in PAGES for name in re.findall(rf"\b{KINDS[kind]}\.([a-z]\w*)", page.read_text())}


@pytest.mark.parametrize("kind", KINDS)
def test_only_documented_names_are_shown(publisher, subscriber, kind):
    pub = publisher({"w": torch.zeros(3)})
    shown = {name for name in dir(pub if kind == "Publisher" else subscriber(pub)) if not name.startswith("_")}
    assert in_the_table(kind) <= shown
    assert shown <= in_the_table(kind) | in_the_pages(kind) | BESIDE
