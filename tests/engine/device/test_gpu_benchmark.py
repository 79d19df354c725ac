"""bench/gpu.py's rows of shmsync, over the device without hardware: what they publish is what workers check."""

import os
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[3] / "bench"


@pytest.mark.skipif(os.environ.get("SHMSYNC_TEST_DEVICE") != "simulated", reason="its processes need the device")
@pytest.mark.parametrize("workers", [1, 3])
def test_the_rows_of_an_arena(monkeypatch, workers):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCH), os.environ["PYTHONPATH"]]))
    import gpu

    monkeypatch.setattr(gpu, "synchronize", torch.get_device_module("simulated").synchronize)
    try:
        rows = list(gpu.arena_rows("small", 1 << 16, workers, 2, "simulated:0"))
    finally:
        for name in ("gpu", "common", *(name for name in sys.modules if name.startswith("common."))):
            sys.modules.pop(name, None)
    assert [row.what.split(",")[0] for row in rows] == [
        "publish",
        "trainer stands still in publish()",
        "worker stands still to move",
        "update() of one value",
    ]
    assert all(not row.trouble for row in rows)
