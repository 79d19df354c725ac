"""Run TorchRL's own tests of weight sync with shmsync's scheme in place of its shared-memory one.

    python tests/upstream/run_torchrl.py PATH_TO_A_TORCHRL_CHECKOUT [--both] [--all] [options of pytest]

The checkout must be of the TorchRL release that is installed; nothing of it is copied or changed. --both puts the
scheme in place of MultiProcessWeightSyncScheme too; --all runs every test of the two files. docs/torchrl.md lists the
tests that need an option, or that expect something else, with the reasons.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torchrl.collectors  # noqa: F401  # so that all of its modules are there to be patched

from shmsync.integrations.torchrl import ShmWeightSyncScheme

SELECTED = [
    "test/test_collectors.py::TestMakePolicyFactory",
    "test/test_collectors.py::TestCollectorGeneric::test_update_weights",
    "test/test_collectors.py::TestCollectorGeneric::test_update_weights_shared_mem",
    "test/test_collectors.py::TestUpdateParams",
    "test/test_collectors.py::TestPolicyVersion",
    "test/test_collectors.py::TestPolicyFactory",
    "test/test_collectors.py::TestAsyncCollection",
    "test/collectors/test_evaluator.py",
]
# These rely on the trainer's tensors being the workers' before any update.
ALIASED = {"TestCollectorGeneric::test_update_weights"}

# Skipped on machines with one device, where there is nothing to cast; but weights are sent all the same.
NO_REASON = {"No casting if no cuda"}


class Swap:
    """Puts the scheme in place, everywhere in TorchRL, before a test module is imported."""

    def __init__(self, names: list[str]) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torchrl"):
                for name in names:
                    if name in vars(module):
                        setattr(module, name, ShmWeightSyncScheme)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if mark.kwargs.get("reason") not in NO_REASON]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        defaults = ShmWeightSyncScheme.__init__.__kwdefaults__
        aliased = any(f"::{name}[" in item.nodeid for name in ALIASED)
        defaults["alias"] = aliased
        try:
            return (yield)
        finally:
            defaults["alias"] = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--all", action="store_true")
    options, rest = parser.parse_known_args()
    for name in ("torchrl.collectors._multi_base", "torchrl.collectors._evaluator"):
        try:
            importlib.import_module(name)
        except ImportError:  # not in this release
            pass
    names = ["SharedMemWeightSyncScheme"] + (["MultiProcessWeightSyncScheme"] if options.both else [])
    chosen = sorted({test.split("::")[0] for test in SELECTED}) if options.all else SELECTED
    paths = [str(options.checkout / test) for test in chosen if (options.checkout / test.split("::")[0]).exists()]
    common = ["--rootdir", str(options.checkout), "-p", "no:cacheprovider"]
    return pytest.main([*paths, *common, *rest], plugins=[Swap(names)])


if __name__ == "__main__":
    sys.exit(main())
