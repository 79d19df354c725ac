"""Folders whose tests need a package: without it each of their files is skipped, and says what brings it."""

from __future__ import annotations

import importlib.util

import pytest


def skipped_without(package, reason):
    """What a conftest.py calls pytest_pycollect_makemodule, to skip the files of its folder.

    Nothing of them is imported then. Any other error at their imports, one in the package too, is an error of the run.
    """

    def make(module_path, parent):
        if importlib.util.find_spec(package) is not None:
            return None  # pytest makes it
        file = Skipped.from_parent(parent, path=module_path)
        file.reason = reason
        return file

    make.__name__ = "pytest_pycollect_makemodule"
    return make


class Skipped(pytest.File):
    """A file of tests that cannot run here."""

    def collect(self):
        pytest.skip(self.reason)
