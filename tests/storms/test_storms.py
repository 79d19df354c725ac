"""No torn weights, hang, leak or false death while workers and trainers are killed, stopped and interrupted.

These storms are short; `make storm` makes long ones. What is judged: support/storms/judge.py.
"""

from __future__ import annotations

import importlib.util

import pytest

from support.storms import storm

STORMS = ["shared-memory", "engine", "engine-device", "shared-memory-3", "multiprocess", "collector", "torchrl", "ray",
          "rpc", "distributed"]  # fmt: skip
# The module, and the extra of shmsync that brings it.
NEEDS = {"ray": ("ray", "ray"), "collector": ("gymnasium", "collectors"), "torchrl": ("torchrl", "torchrl")}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORMS)
def test_a_storm_breaks_no_promise(name, request):
    module, extra = NEEDS.get(name, (None, None))
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"this storm needs {module}, which shmsync[{extra}] brings")
    sky = storm.run(name, 4, seed=12)
    assert sky.counts["send"] > 0 and sky.counts["steps"] > 0
