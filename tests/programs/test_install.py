"""Installing from a clone: what its root says before the build, an editable install, and where it can be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import shmsync

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")


def run(*command, cwd, check=False):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def clone(tmp_path):
    """The files of a fresh clone."""
    names = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.pyi", "__pycache__", "*-results")
    return Path(shutil.copytree(ROOT, tmp_path / "clone", ignore=names))


def test_the_source_folder_says_what_is_wrong_and_the_cure(clone):
    done = run(sys.executable, "-c", "import shmsync", cwd=clone)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    for words in (str(clone / "shmsync"), "pip install -e .", "another folder"):
        assert words in last
    assert "circular" not in done.stderr


@pytest.mark.slow
def test_an_editable_install_works_from_the_root_of_the_clone(clone, tmp_path):
    if CMAKE is None:
        pytest.skip("needs cmake: pip install cmake")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).stdout.strip())
    (site / "dependencies.pth").write_text(str(Path(shmsync.__file__).parents[1]))  # torch and the build's tools
    install = ("install", "-q", "--no-build-isolation", "--no-deps", "-e", ".")
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=clone, check=True)
    source = clone / "shmsync" / "__init__.py"
    source.write_text(source.read_text().replace('__version__ = "0.1.0"', '__version__ = "edited"'))
    program = """
import torch, shmsync
with shmsync.Publisher({"t": torch.ones(3)}) as pub, shmsync.Subscriber(pub.handle) as sub:
    print(shmsync.__file__, shmsync.__version__, sub.snapshot().weights["t"].sum().item())
"""
    for folder in (clone, tmp_path):
        done = run(python, "-c", program, cwd=folder, check=True)
        assert done.stdout.split() == [str(source), "edited", "3.0"]
