"""Every Python block of the README and of docs/ runs as it stands, each in a separate process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs.engine import run_source

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "__main__" not in block  # needs a separate file: test_quickstart.py
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(start, block):
    start().call(run_source, block)
