"""A write into read-only weights ends the process with one line that says which weights, and what to do instead."""

from __future__ import annotations

import signal

import pytest

import shmsync
from support.jobs.engine import run_with_stderr
from support.weights import Net
from support.worker import Gone

pytestmark = pytest.mark.host_memory(reason="a device's memory cannot be mapped read-only")

OURS = "shmsync: "
PRELUDE = """
import ctypes, faulthandler
import torch
import shmsync
from support.weights import Net
"""
WAYS = {
    "a subscriber's weights": "shmsync.Subscriber(name).weights['0', 'weight'].fill_(1)",
    "a bound parameter": """
sub = shmsync.Subscriber(name)
net = sub.bind(Net(1))
with torch.no_grad():
    net[0].weight.add_(1)
""",
}


@pytest.fixture
def arena(name):
    with shmsync.Publisher(Net(0), name=name) as pub:
        yield pub


@pytest.fixture
def died(start, arena, tmp_path):
    """died(program, expected) -> what it wrote to stderr, in a separate process that ended so."""

    def make(program, expected=-signal.SIGSEGV):
        errors = tmp_path / "stderr"
        with pytest.raises(Gone) as caught:
            start().call(run_with_stderr, PRELUDE + program, arena.name, errors)
        assert caught.value.exitcode == expected, errors.read_text()
        return errors.read_text()

    return make


def lines_of_ours(stderr):
    return [line for line in stderr.splitlines() if OURS in line]


@pytest.mark.parametrize("way", WAYS)
def test_a_write_into_read_only_weights_says_which_and_what_to_do(arena, died, way):
    (line,) = lines_of_ours(died(WAYS[way]))
    assert f"arena '{arena.name}'" in line
    assert "read-only" in line and "snapshot()" in line and "update()" in line


@pytest.mark.parametrize("order", ["before", "after"])
def test_faulthandler_still_prints_its_traceback(died, order):
    attach, enable = "sub = shmsync.Subscriber(name)\n", "faulthandler.enable()\n"
    start = enable + attach if order == "before" else attach + enable
    stderr = died(start + "sub.weights['0', 'weight'].fill_(1)")
    assert len(lines_of_ours(stderr)) == 1
    assert stderr.count("Fatal Python error: Segmentation fault") == 1
    assert 'File "<string>", line' in stderr


def test_a_fault_elsewhere_has_no_line_of_ours(died):
    stderr = died("faulthandler.enable()\nsub = shmsync.Subscriber(name)\nctypes.memset(64, 1, 1)")
    assert not lines_of_ours(stderr)
    assert "Fatal Python error: Segmentation fault" in stderr
