"""Runs the tests of unit/ and engine/ under other versions of Python and torch, each in a separate environment.

    python tools/matrix.py --python python3.12 python3.13 --torch 2.13.0 2.6.0

The environments lie in build/matrix and are used again. pip takes the torch that its configuration offers: without one
for processors alone that is the build with CUDA, of several gigabytes for each Python. A version that cannot be had, or
built for, is a row too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "matrix"
NEEDED = ["numpy", "pytest", "pytest-timeout", "pytest-xdist"]
VERSIONS = (
    "import platform, torch, tensordict; print(platform.python_version(), torch.__version__, tensordict.__version__)"
)


def run(*command: str | Path, seconds: float = 3600) -> subprocess.CompletedProcess[str]:
    """Run it where no source folder shadows the package."""
    words = [str(each) for each in command]
    return subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=seconds, check=False)


def clean_copy() -> Path:
    """What git has of the sources: a build in the repository would look through all environments."""
    copy = PLACE / "source"
    run("rm", "-rf", copy)
    run("git", "clone", "-q", ROOT, copy)
    return copy


def tried(python: str, torch: str, source: Path, tests: list[str]) -> list[str]:
    """One row: versions, and what came of it."""
    folder = PLACE / f"{Path(python).name}-torch-{torch}"
    if shutil.which(python) is None or (not folder.exists() and run(python, "-m", "venv", folder).returncode):
        return [python, torch, "-", "there is no such Python"]
    own = folder / "bin" / "python"
    pip = [own, "-m", "pip", "install", "-q"]
    if run(*pip, f"torch=={torch}", *NEEDED).returncode:
        return [python, torch, "-", "this torch cannot be had for it"]
    run(own, "-m", "pip", "uninstall", "-q", "-y", "shmsync")
    built = run(*pip, f"{source}[collectors,demo,metrics,safetensors]", f"torch=={torch}")
    if built.returncode:
        print(built.stdout, built.stderr, file=sys.stderr)
        return [python, torch, "-", "shmsync cannot be installed"]
    versions = run(own, "-c", VERSIONS).stdout.split()
    where = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *(ROOT / each for each in tests)]
    done = run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", *where)
    (folder / "output").write_text(done.stdout + done.stderr)
    found = re.findall(r"^=* ?((?:\d+ \w+,? ?)+) in ", done.stdout, re.MULTILINE)
    return [*versions, found[-1] if found else f"pytest ended with {done.returncode}: {folder / 'output'}"]


def table(rows: list[list[str]], tests: list[str]) -> str:
    """As Markdown."""
    head = [
        f"{' and '.join(tests)}, {date.today()}:",
        "",
        "| Python | torch | TensorDict | tests |",
        "|---|---|---|---|",
    ]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def main() -> None:
    """Try all pairs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[f"python3.{minor}" for minor in range(10, 15)])
    parser.add_argument("--torch", nargs="+", default=["2.13.0"])
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/engine"])
    given = parser.parse_args()
    source = clean_copy()
    rows = [tried(python, torch, source, given.tests) for python in given.python for torch in given.torch]
    print(table(rows, given.tests))


if __name__ == "__main__":
    main()
