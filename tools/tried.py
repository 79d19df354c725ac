"""Writes into the table of docs/reliability.md how many cases of each test ran, and how long the longest one took.

    make test ARGS=--junitxml=/tmp/tests.xml
    make test-failpoints CHOICE=all ARGS=--junitxml=/tmp/failpoints.xml
    python tools/tried.py docs/reliability.md /tmp/tests.xml /tmp/failpoints.xml

A row names its tests as a file of tests/, a folder, a function of the file before it, or "the same". The longest case
is that of the whole test, with the processes that it starts: no recovery in it took longer.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HEAD = "| fault | promise | test | cases | longest |"


class Case(NamedTuple):
    """One case that ran and passed."""

    file: str
    function: str
    seconds: float


def cases(reports: list[Path]) -> list[Case]:
    """Those of these JUnit reports."""
    found = []
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        if any(child.tag in ("skipped", "failure", "error") for child in case):
            continue
        file = case.get("classname", "").rpartition("tests.")[2].replace(".", "/") + ".py"
        found.append(Case(file, case.get("name", "").partition("[")[0], float(case.get("time", 0))))
    return found


def tests_of(cell: str, before: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(file or folder, function or "") of each test that a row names; `before`: those of the row before."""
    if cell.startswith("the same"):
        return before
    file, found = before[-1][0] if before else "", []
    for name in re.findall(r"`([\w/.]+)`", cell):
        if name.startswith("test_"):
            found = [each for each in found if each != (file, "")] + [(file, name)]
        else:
            file = name
            found.append((file, ""))
    return found


def filled(row: str, tests: list[tuple[str, str]], ran: list[Case]) -> str:
    """The row with its two last cells; as it was where none of its tests ran."""
    hits = [
        case
        for case in ran
        if any(case.file.startswith(file) and function in ("", case.function) for file, function in tests)
    ]
    if not hits:
        return row
    fault, promise, named, *_ = (cell.strip() for cell in row.strip("|").split(" | "))
    return f"| {fault} | {promise} | {named} | {len(hits):,} | {max(case.seconds for case in hits):.1f} s |"


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    given = parser.parse_args()
    ran, tests, lines, inside = cases(given.reports), [], [], False
    for line in given.page.read_text().splitlines():
        inside = line.startswith(HEAD) or (inside and line.startswith("|"))
        if inside and not line.startswith((HEAD, "|---")):
            tests = tests_of(line.strip("|").split(" | ")[2].strip(), tests)
            line = filled(line, tests, ran)
        lines.append(line)
    given.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
