"""What is for a machine with a GPU, over the device without hardware: the benchmark and the probe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
needs_device = pytest.mark.skipif(
    os.environ.get("SHMSYNC_TEST_DEVICE") != "simulated", reason="its processes need the device: make test-device"
)


@needs_device
def test_the_benchmark_publishes_what_its_workers_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "bench"), os.environ["PYTHONPATH"]]))
    import gpu

    monkeypatch.setattr(gpu, "synchronize", torch.get_device_module("simulated").synchronize)
    try:
        rows = list(gpu.arena_rows("small", 1 << 16, 2, 2, "simulated:0", gpu.llama()))
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


@needs_device
def test_the_probe_learns_each_fact():
    command = [sys.executable, ROOT / "tools" / "gpu_probe.py", "--small", "--device", "simulated:0"]
    environment = {**os.environ, "SHMSYNC_TEST_TENSORS": "host"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, cwd="/")
    found = json.loads(done.stdout)
    assert {name: fact for name, fact in found.items() if "value" not in fact} == {}
    assert found["another_process_reads"]["value"]["right"]
    assert found["the_exporter_is_killed"]["value"]["before"] == 5.0
    assert {"1, publish", "64, foreach"} <= found["bandwidth"]["value"].keys()
