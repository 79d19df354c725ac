"""Run TorchRL's own tests of weight sync with shmsync's scheme in place of its shared-memory one.

    TORCHRL_CHECKOUT=PATH python tests/upstream/run_torchrl.py [--both] [--all] [options of pytest]

Where there is no checkout, the run fails, and says how to get it: no package of TorchRL contains its tests. The
checkout must be of the TorchRL release that is installed; nothing of it is copied or changed. --both puts the scheme
in place of MultiProcessWeightSyncScheme too. --all runs every test of these files; without it a test runs once where
its cases differ in the scheme alone. Left out is TestCollectorGeneric::test_update_weights, which requires that
workers see the trainer's writes before any update. TestUpdateParams runs on one device too; TestWeightSyncIntegration
sends through a scheme in place of a queue.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl
import torchrl.collectors  # so that all of its modules are there to be patched

from shmsync.integrations.torchrl import ShmWeightSyncScheme

SELECTED = [
    "test/test_collectors.py::TestMakePolicyFactory",
    "test/test_collectors.py::TestCollectorGeneric::test_update_weights_shared_mem",
    "test/test_collectors.py::TestUpdateParams",
    "test/test_collectors.py::TestPolicyVersion",
    "test/test_collectors.py::TestPolicyFactory",
    "test/test_collectors.py::TestAsyncCollection::test_start_update_policy",
    "test/collectors/test_evaluator.py::TestEvaluatorProcess::test_with_weights",
    "test/collectors/test_evaluator.py::TestEvaluatorProcessBackendAsMultiCollector",
    "test/collectors/test_evaluator.py::TestEvaluatorWeightsDict",
    "test/test_inference_server.py::TestWeightSyncIntegration",
]

# Skipped on machines with one device, where there is nothing to cast; but weights are sent all the same.
NO_REASON = {"No casting if no cuda"}


class Swap:
    """Puts the scheme in place, everywhere in TorchRL, before a test module is imported."""

    def __init__(self, names: list[str], everything: bool) -> None:
        self.everything = everything
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torchrl"):
                for name in names:
                    if name in vars(module):
                        setattr(module, name, ShmWeightSyncScheme)
        registered = getattr(torchrl.weight_update.weight_sync_schemes, "_WEIGHT_SYNC_SCHEMES", {})  # from_backend()'s
        for backend, scheme in registered.items():
            if scheme.__name__ in names:
                registered[backend] = ShmWeightSyncScheme

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self.everything:
            once = {_same(item): item for item in items}  # the last: the ones before may leave the scheme out
            config.hook.pytest_deselected(items=[item for item in items if once[_same(item)] is not item])
            items[:] = once.values()
        for item in items:
            if hasattr(item.module, "_SimpleWeightSync"):
                item.module._SimpleWeightSync = Pushed
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if mark.kwargs.get("reason") not in NO_REASON]


class Pushed:
    """What TestWeightSyncIntegration pushes weights through: a scheme in the trainer, and a server's copy of it."""

    initialized_on_receiver = synchronized_on_receiver = False

    def init_on_receiver(self, *, model_id: str, model: Any = None, **given: Any) -> None:
        self.trainer = ShmWeightSyncScheme()
        self.trainer.init_on_sender(model_id=model_id, model=copy.deepcopy(model), devices=[torch.device("cpu")])
        self.trainer.connect()
        self.scheme = pickle.loads(pickle.dumps(self.trainer))
        self.scheme.init_on_receiver(model_id=model_id, model=model, **given)
        self.initialized_on_receiver = True

    def connect(self, **given: Any) -> None:
        self.scheme.connect(**given)
        self.receive = self.scheme.receive
        self.synchronized_on_receiver = True

    def push(self, weights: Any) -> None:
        self.trainer.send(weights)


def _same(item: pytest.Item) -> tuple[str, ...]:
    """Equal for tests that differ in the scheme alone, which is one now, or in devices of one name."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    rest = [f"{name}={value}" for name, value in given.items() if name != "weight_sync_scheme"]
    return (item.nodeid.split("[")[0], *sorted(rest))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--all", action="store_true")
    options, rest = parser.parse_known_args()
    checkout = Path(os.environ.get("TORCHRL_CHECKOUT", ""))
    if not (checkout / "test/test_collectors.py").is_file():
        parser.error(
            f"no tests of TorchRL at TORCHRL_CHECKOUT={checkout}: git clone -b v{torchrl.__version__} "
            "https://github.com/pytorch/rl, and set it to that folder"
        )
    for name in ("torchrl.collectors._multi_base", "torchrl.collectors._evaluator"):
        try:
            importlib.import_module(name)
        except ImportError:  # not in this release
            pass
    names = ["SharedMemWeightSyncScheme"] + (["MultiProcessWeightSyncScheme"] if options.both else [])
    chosen = sorted({test.split("::")[0] for test in SELECTED}) if options.all else SELECTED
    paths = [str(checkout / test) for test in chosen if (checkout / test.split("::")[0]).exists()]
    common = ["--rootdir", str(checkout), "-p", "no:cacheprovider"]
    return pytest.main([*paths, *common, *rest], plugins=[Swap(names, options.all)])


if __name__ == "__main__":
    sys.exit(main())
