"""Print the test files that reach what has changed since a commit: `make test CHANGED=1`, or CHANGED=main.

A test file reaches what it imports, and what that imports in turn. A name that a package shows leads to the file that
defines it, so a test of Publisher does not reach collectors. programs/ and unit/project/, the checks of the source
itself, reach everything. A change of anything that is no module of Python, such as native/, reaches every test.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
TOPS = {"shmsync": ROOT, "support": TESTS}  # where these packages lie
NO_TEST = ("CHANGELOG.md", "LICENSE", ".ci/", "tools/", "tests/README.md")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/", "examples/", "bench/", "mkdocs.yml")  # what programs/ runs or reads
OF_ALL = ("tests/programs/", "tests/unit/project/")


def file_of(module: str) -> Path | None:
    """The file of a dotted module of ours."""
    top, *_ = module.split(".")
    if top not in TOPS:
        return None
    if module.startswith("shmsync.examples"):
        return ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    path = TOPS[top].joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(path: Path) -> list[str]:
    top = next((top for top in TOPS.values() if top in path.parents and top != ROOT), ROOT)
    return list(path.relative_to(top).parent.parts)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports, by statement or attribute; name "": the module alone."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            package = package_of(path)
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)).startswith("shmsync."):
            module, _, name = dotted.rpartition(".")
            yield module, name


def home_of(module: str, name: str) -> Path | None:
    """The file that defines what a module shows under this name; for "", or a module, its file."""
    inner = file_of(f"{module}.{name}") if name else None
    path = inner or file_of(module)
    if inner or path is None or path.name != "__init__.py" or not name:
        return path
    for source, shown in imported(path):
        if source == module:
            continue
        if shown == name:
            return home_of(source, name)
        if shown == "*" and (found := home_of(source, name)) not in (None, file_of(source)):
            return found
    return path


@cache
def reached_directly(path: Path, *, of_package: bool = False) -> frozenset[Path]:
    """What a file imports. What a package's __init__ shows counts for the files that use it by its name."""
    found: set[Path | None] = set()
    if path.name != "__init__.py" or of_package:
        for module, name in imported(path):
            home = home_of(module, name)
            found.add(home)
            if home and home.name == "__init__.py" and home == file_of(f"{module}.{name}"):  # the package itself
                found |= reached_directly(home, of_package=True)
    return frozenset(each for each in found if each is not None)


def reached(path: Path) -> set[Path]:
    """All files that a test file reaches, with the conftest.py of each folder above it."""
    todo = [path, *(each / "conftest.py" for each in path.parents if TESTS in (each, *each.parents))]
    found: set[Path] = set()
    while todo:
        each = todo.pop()
        if each not in found and each.exists():
            found.add(each)
            todo += reached_directly(each)
    return found


def reaching(changed: list[str]) -> list[str]:
    """The test files, below the root, that reach these files, which are below the root."""
    changed = [name for name in changed if not name.startswith(NO_TEST)]
    everything = any(not name.startswith(PAGES) and not name.endswith(".py") for name in changed)
    of_all = any(not name.startswith("tests/") for name in changed)
    files = {ROOT / name for name in changed}
    names = {path: str(path.relative_to(ROOT)) for path in sorted(TESTS.rglob("test_*.py"))}
    return [
        name
        for path, name in names.items()
        if everything or (of_all and name.startswith(OF_ALL)) or reached(path) & files
    ]


def main(since: str) -> int:
    """Print them, one a line."""
    git = ["git", "-C", str(ROOT)]
    commits = ["diff", "--name-only", "HEAD" if since == "1" else since]
    unknown = ["ls-files", "--others", "--exclude-standard"]
    commands = [[*git, *commits], [*git, *unknown]]
    texts = [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands]
    print(*reaching("".join(texts).splitlines()), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
