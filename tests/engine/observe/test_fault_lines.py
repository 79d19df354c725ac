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
import ctypes, faulthandler, os, signal
import torch
import shmsync
from support.weights import Net
libc = ctypes.CDLL(None, use_errno=True)
def elsewhere():
    ctypes.memset(64, 1, 1)
"""
USERS_HANDLER = """
@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def handler(signum, info, context):
    os.write(2, b"the user's handler: %d at %#x" % (signum, ctypes.c_uint64.from_address(info + 16).value))
    os._exit(77)
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64 * 16),
                ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
action = Action(ctypes.cast(handler, ctypes.c_void_p), (ctypes.c_uint64 * 16)(), 4, None)  # SA_SIGINFO
def install():
    assert libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None) == 0
"""
WAYS = {
    "a subscriber's weights": "shmsync.Subscriber(name).weights['0', 'weight'].fill_(1)",
    "a bound parameter": """
sub = shmsync.Subscriber(name)
net = sub.bind(Net(1))
with torch.no_grad():
    net[0].weight.add_(1)
""",
    "weights after close": """
sub = shmsync.Subscriber(name)
kept = sub.weights["0", "weight"]
sub.close()
del sub
kept.fill_(1)
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


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_of_the_users_own_is_still_called_with_the_fault(died, order):
    attach, install = "sub = shmsync.Subscriber(name)\n", "install()\n"
    start = install + attach if order == "before" else attach + install
    fault = "at = sub.weights['0', 'weight'].data_ptr()\nos.write(2, b'%#x\\n' % at)\nctypes.memset(at, 1, 1)"
    stderr = died(USERS_HANDLER + start + fault, 77)
    address = stderr.splitlines()[0]
    assert f"the user's handler: {int(signal.SIGSEGV)} at {address}" in stderr
    assert len(lines_of_ours(stderr)) == (order == "before")  # a later handler that does not chain decides


BEFORE = {
    "none": ("", -signal.SIGSEGV, ""),
    "faulthandler": ("faulthandler.enable()\n", -signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
    "user": (USERS_HANDLER + "install()\n", 77, "at 0x40"),
}


@pytest.mark.parametrize("handlers", BEFORE)
def test_a_fault_elsewhere_has_no_line_of_ours(died, handlers):
    before, status, words = BEFORE[handlers]
    stderr = died(before + "sub = shmsync.Subscriber(name)\nelsewhere()", status)
    assert not lines_of_ours(stderr)
    assert words in stderr
