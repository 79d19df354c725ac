"""For every Python process of a test run with SHMSYNC_TEST_DEVICE=simulated, or cuda: arenas and new tensors lie on it.

Python imports this file at its start when this folder is in PYTHONPATH. Nothing is imported before shmsync is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys


class _Install(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds shmsync.memory.devices as ever, and registers the device when it has been imported."""

    NAME = "shmsync.memory.devices"

    def find_spec(self, fullname, path, target=None):
        if fullname != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        self.found = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.found.exec_module(module)
        if os.environ["SHMSYNC_TEST_DEVICE"] == "cuda":
            from support.devices.first_gpu import install
        else:
            from support.devices.simulated import install
        install(module)


sys.meta_path.insert(0, _Install())
