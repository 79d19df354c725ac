"""docs/coming-from-torchrl.md: what it imports is there, and each of its rows has a test."""

import ast
import re
from pathlib import Path

import pytest

import shmsync

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "docs" / "coming-from-torchrl.md").read_text()


def rows():
    """Each row of a table whose last column is "test", by its first cell."""
    found, wanted = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            wanted = False
        elif cells[-1].strip(" |") == "test":
            wanted = True
        elif wanted and not set(line) <= set("|-"):
            found.append((cells[0].strip("| "), cells[-1].strip(" |`")))
    return found


def missing(name):
    """Why there is no such test; None: there is."""
    path, _, function = name.partition("::")
    if not function or not (TESTS / path).is_file():
        return f"{name!r} is not the name of a test, such as conformance/test_x.py::test_y"
    functions = {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    return None if function in functions else f"{path} has no {function}()"


def test_every_row_has_a_test():
    assert len(rows()) > 20
    assert [problem for _, name in rows() if (problem := missing(name))] == []


NONE = "conformance/scheme/test_none.py"


@pytest.mark.parametrize("name", [NONE, f"{NONE}::test_of_no_such_name", "unit/test_x.py::test_y", "unit/test_abc"])
def test_what_is_no_test_is_noticed(name):
    assert missing(name)


def test_names_to_import_are_there():
    imports = re.findall(r"`from shmsync import ([^`]+)`", PAGE)
    assert len(imports) == 10
    for name in ", ".join(imports).split(", "):
        assert name in shmsync.__all__ or name in shmsync.schemes.__all__, name
