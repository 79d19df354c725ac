"""The house: folders are layers, and imports point down.

Each folder's __init__ ends its docstring with "May be imported by A, B and C." That sentence is the rule.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import shmsync

PACKAGE = Path(shmsync.__file__).parent
RULE = re.compile(r"May be imported by ([^.]+)\.")
EVERYBODY = {"errors"}  # at the bottom of the house


def sources() -> dict[str, str]:
    """The text of each module of the package, by its path below it: "engine/publisher", "engine/__init__"."""
    paths = [path for path in PACKAGE.rglob("*.py") if "examples" not in path.relative_to(PACKAGE).parts]
    return {str(path.relative_to(PACKAGE).with_suffix("")): path.read_text() for path in paths}


def imports(module: str, text: str, modules: set[str]) -> set[str]:
    """The modules of this package that one imports, for types only too."""
    found = set()
    folder = module.split("/")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) + 1 - node.level], *(node.module or "").split(".")]
            path = "/".join(part for part in base if part)
            for name in (alias.name for alias in node.names):
                inner = f"{path}/{name}" if path else name
                choices = (inner, f"{inner}/__init__", path, f"{path}/__init__" if path else "__init__")
                found.add(next((choice for choice in choices if choice in {*modules, "_native"}), inner))
    return {name for name in found if not name.startswith(("_native", "examples"))} - {module}


def graph(texts: dict[str, str]) -> dict[str, set[str]]:
    return {module: imports(module, text, set(texts)) for module, text in texts.items()}


def folder_of(module: str) -> str:
    return module.rpartition("/")[0]


def circles(texts: dict[str, str]) -> list[str]:
    """Files that import each other in a loop, under TYPE_CHECKING too, and folders that do."""
    files = graph(texts)
    folders: dict[str, set[str]] = {}
    for module, imported in files.items():
        if not module.endswith("__init__"):  # a folder's face is above what it shows
            inner = {folder_of(other) for other in imported if not other.endswith("__init__")}
            folders.setdefault(folder_of(module), set()).update(
                each for each in inner if apart(each, folder_of(module))
            )
    for what in (files, folders):
        try:
            TopologicalSorter(what).prepare()
        except CycleError as error:
            return [" → ".join(error.args[1])]
    return []


def apart(one: str, other: str) -> bool:
    """Is neither folder inside the other?"""
    return not (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/") or "" in (one, other))


def trespasses(texts: dict[str, str]) -> list[str]:
    """Imports that the imported folder's own sentence does not allow."""
    rules = {}
    for module, text in texts.items():
        if module.endswith("/__init__"):
            rule = RULE.search(" ".join((ast.get_docstring(ast.parse(text)) or "").split()))
            rules[folder_of(module)] = set(re.split(r", | and ", rule[1])) if rule else set()
    found = []
    for module, imported in graph(texts).items():
        for other in imported - EVERYBODY:
            home, target = folder_of(module), folder_of(other)
            inside = f"{home}/".startswith(f"{target}/") and not other.endswith("__init__")
            face = module.endswith("__init__") and f"{target}/".startswith(f"{home}/" if home else "")
            allowed = {home, module, *(home[: match.start()] for match in re.finditer("/", home))}
            if not (inside and target) and not face and not allowed & rules.get(target, set()):
                found.append(f"{module} imports {other}")
    return sorted(found)


def test_no_file_and_no_folder_imports_in_a_circle():
    assert len(sources()) > 50
    assert circles(sources()) == []


def test_a_folder_is_imported_by_those_alone_that_its_docstring_names():
    assert trespasses(sources()) == []
