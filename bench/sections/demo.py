"""From the start of the demo until its learner has the first frames of its four actors, beside one import of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.clock import Clock
from common.measure import rounds, row, timed
from common.row import Row

SEEN = "figures:"  # what the demo prints when it has the frames that were asked for, and before it draws


def rows(clock: Clock) -> Iterator[Row]:
    clock.row(1)
    pairs = [(first_frames(), imported()) for _ in rounds(3, fewest=1)]
    ours, floor = map(list, zip(*pairs, strict=True))
    yield row("demo, from the command to the first frames / import torch", ours, floor, "5000 ms")


def first_frames() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shmsync.cli", "demo", "--max-steps", "1", "--out", folder]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        start = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seen = next((time.perf_counter() for line in process.stdout if SEEN in line), None)
            process.stdout.read()
        assert seen is not None, "the demo ended without frames"
        results = json.loads(Path(folder, "figures.json").read_text())["results"]
        assert results["env_steps"] > 0 and results["torn_reads_acted_upon"] == 0, "checksum"
    return seen - start


def imported() -> float:
    return timed(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
