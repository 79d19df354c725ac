"""The house: folders are layers, imports point down, and no file uses another's underscore names.

Each folder's __init__ ends its docstring with "May be imported by A, B and C." That sentence is the rule.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shmsync

PACKAGE = Path(shmsync.__file__).parent
TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
BENCH = ROOT / "bench"
RULE = re.compile(r"May be imported by ([^.]+)\.")
MOST_FILES = 14
MOST_LINES = 400
EVERYBODY = {"errors"}  # at the bottom of the house
NATIVE = "_native"  # the core: its underscore hides it from users of the package, not from the package
OF_OTHER_PACKAGES = {  # underscore names that a file here has too, and why another file asks an object for them
    "_carrier": "TorchRL's collector has its own batch there (worker/clock.py)",
    "_actor": "TorchRL's collector over Ray has the handle there (ray/ray_scheme.py)",
}


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


def stub() -> str:
    """What the native core binds, as the build writes it down for mypy."""
    return (PACKAGE / f"{NATIVE}.pyi").read_text()


def underscore_names(text: str) -> tuple[set[str], set[tuple[str, str]]]:
    """The underscore names that a file defines, and those that it uses: (name, how)."""
    defined, used = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            used.update((alias.name, "imported") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            parent = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if isinstance(node.ctx, ast.Store) and own:
                defined.add(node.attr)
            if not (own or parent):  # a class may use what it inherits
                used.add((node.attr, ast.unparse(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            whose, name, *_ = node.args
            if isinstance(name, ast.Constant) and getattr(whose, "id", "") not in ("self", "cls"):
                used.add((name.value, ast.unparse(node)))
    private = re.compile(r"_[a-z]", re.IGNORECASE)
    return {name for name in defined if private.match(name)}, {each for each in used if private.match(each[0])}


def reaches(texts: dict[str, str]) -> list[str]:
    """Uses of an underscore name that another file of this package defines, and the file itself does not.

    The core is such a file, in the form of its stub. A class that derives from one of its classes may use
    what it inherits, other files may not.
    """
    allowed = {NATIVE, *OF_OTHER_PACKAGES}
    names = {module: underscore_names(text) for module, text in texts.items()}
    found = []
    for module, (own, used) in names.items():
        others = set().union(*(defined for other, (defined, _) in names.items() if other != module))
        found += [f"{module}: {how} ({name})" for name, how in used if name in others - own - allowed]
    return sorted(found)


def twins(texts: dict[str, str]) -> list[str]:
    """Class names that two files define: a name has one meaning."""
    homes: dict[str, list[str]] = {}
    for module, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(module)
    return sorted(f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1)


def crowds(texts: dict[str, str]) -> list[str]:
    """Folders of more files, and files of more lines, than one reader takes in at once."""
    folders: dict[str, int] = {}
    for module in texts:
        folders[folder_of(module)] = folders.get(folder_of(module), 0) + 1
    found = [f"{folder} has {count} files" for folder, count in folders.items() if count > MOST_FILES]
    return found + long(texts)


def long(texts: dict[str, str]) -> list[str]:
    """Files of more lines than one idea needs."""
    return [f"{name} has {lines} lines" for name, text in texts.items() if (lines := text.count("\n")) > MOST_LINES]


CHECKS = [circles, trespasses, twins, crowds]


@pytest.mark.parametrize(("root", "fewest"), [(TESTS, 30), (BENCH, 6)], ids=["tests", "bench"])
def test_no_folder_is_a_crowd(root, fewest):
    files = Counter(path.parent for path in root.rglob("*") if path.suffix in (".py", ".c"))
    assert len(files) >= fewest
    assert [f"{folder} has {count} files" for folder, count in files.items() if count > MOST_FILES] == []


@pytest.mark.parametrize("folder", ["tests", "bench", "examples", "tools", "native"])
def test_no_file_is_long(folder):
    suffixes = (".py", ".c", ".cpp", ".hpp")
    texts = {str(path): path.read_text() for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}
    assert texts
    assert long(texts) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_is_in_order(check):
    assert check(sources()) == []


def test_no_file_reaches_into_another():
    assert reaches({**sources(), NATIVE: stub()}) == []


def test_the_core_binds_no_underscore_names():
    assert underscore_names(stub())[0] == set()


@pytest.mark.parametrize("name", OF_OTHER_PACKAGES)
def test_an_excuse_is_needed(name, monkeypatch):
    monkeypatch.delitem(OF_OTHER_PACKAGES, name)
    assert reaches(sources())


FOLDER = '"""A folder.\n\nMay be imported by engine and schemes.\n"""'
PLANTED = [
    (circles, {"a/x": "from ..b.y import Y", "b/y": "if TYPE_CHECKING:\n    from ..a.x import X"}),
    (circles, {"a/x": "from .y import Y", "a/y": "from .x import X"}),
    (circles, {"a/x": "from ..b.y import Y", "b/y": "", "b/z": "from ..a.w import W", "a/w": ""}),
    (trespasses, {"memory/__init__": FOLDER, "memory/slab": "", "cli": "from .memory.slab import Slab"}),
    (trespasses, {"memory/__init__": FOLDER, "memory/slab": "from ..engine import update", "engine/update": ""}),
    (
        trespasses,
        {"memory/__init__": FOLDER, "memory/slab": "from . import x", "memory/x": "from .. import y", "y": ""},
    ),
    (reaches, {"a": "class A:\n    def _hidden(self): ...", "b": "a._hidden()"}),
    (reaches, {"a": "class A:\n    def __init__(self):\n        self._side = 1", "b": "self.a._side"}),
    (reaches, {"a": "_limit = 3", "b": "from .a import _limit"}),
    (reaches, {"a": "class A:\n    async def _hidden(self): ...", "b": "getattr(a, '_hidden')()"}),
    (reaches, {"_native": "class Reader:\n    def _hidden(self) -> None: ...", "b": "reader._hidden()"}),
    (twins, {"a": "class Inbox: ...", "b": "class _Inbox: ..."}),
    (crowds, {f"a/{number}": "" for number in range(15)}),
    (crowds, {"a/x": "pass\n" * 401}),
]


@pytest.mark.parametrize(("check", "texts"), PLANTED, ids=[check.__name__ for check, _ in PLANTED])
def test_a_fault_is_found(check, texts):
    assert len(check(texts)) == 1
