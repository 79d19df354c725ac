"""Makes examples/tutorial.ipynb from docs/tutorial.md: the one is the other with its programs in cells.

    python tools/notebook.py

A program becomes a cell that writes its file, a command a cell that runs it, with the output that the page shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "tutorial.ipynb"
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```\n', re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)")


def notebook(page: str) -> str:
    """The text of the notebook."""
    cells: list[dict[str, Any]] = []

    def add(text: str, output: str | None = None) -> None:
        cell: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{len(cells)}", "metadata": {}}
        if output is not None:
            streams = [{"name": "stdout", "output_type": "stream", "text": output.splitlines(True)}] if output else []
            cell |= {"cell_type": "code", "execution_count": None, "outputs": streams}
        cells.append(cell | {"source": text.splitlines(True)})

    def prose(text: str) -> None:
        if text := re.sub(r"<!--.*?-->", "", text).strip():
            add(LINK.sub("](../docs/", text))

    end = 0
    for block in BLOCK.finditer(page):
        prose(page[end : block.start()])
        if block["title"]:
            add(f"%%writefile {block['title']}\n{block['text']}".rstrip("\n"), "")
        else:
            command, _, output = block["text"].removeprefix("$ ").partition("\n")
            add(f"!{command}", output)
        end = block.end()
    prose(page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
