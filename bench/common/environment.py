"""What a benchmark's processes find: environment variables, a path for imports, and installed packages."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@contextmanager
def environment() -> Iterator[None]:
    """Each process that starts from here on has one thread, and bench/ on its path, as fork servers and actors need."""
    before = dict(os.environ)
    os.environ |= dict.fromkeys(ONE_THREAD, "1")
    os.environ |= {"PYTHONWARNINGS": "ignore", "RL_WARNINGS": "0", "RL_LOGGING_LEVEL": "WARNING"}
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else whatever else runs here slows actors alone
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = folder  # TorchRL leaves a folder for each replay buffer
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def more_files() -> None:
    """Raise the limit of open files: torch shares each tensor by a separate descriptor."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def installed(package: str) -> bool:
    """Look outside of bench/, which has a torchrl.py."""
    paths = [each for each in sys.path if Path(each).resolve() != BENCH]
    return PathFinder.find_spec(package, paths) is not None
