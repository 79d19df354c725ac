"""A write into read-only weights ends the process with one line that says which weights, and what to do instead."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import shmsync
from support.choice import first
from support.processes import segment_path
from support.weights import Net

pytestmark = pytest.mark.host_memory(reason="a device's memory cannot be mapped read-only")

OURS = "shmsync: "
PRELUDE = """
import ctypes, faulthandler, os, signal, sys
import torch
import shmsync
from support.weights import Net
name = sys.argv[1]
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
    "an optimizer of a bound module": """
sub = shmsync.Subscriber(name)
net = sub.bind(Net(1))
for parameter in net.parameters():
    parameter.grad = torch.ones_like(parameter)
torch.optim.SGD(net.parameters(), lr=1.0).step()
""",
    "a publisher's weights": """
pub = shmsync.Publisher(Net(0), name=name + "-own")
pub.weights["0", "weight"].numpy()[0] = 1
""",
    "adopted parameters in a forked child": """
pub = shmsync.Publisher(Net(0), name=name + "-own")
net = Net(0)
pub.adopt(net)
child = os.fork()
if child == 0:
    with torch.no_grad():
        net[0].weight.add_(1)
    os._exit(0)
status = os.waitpid(child, 0)[1]
pub.close()
os._exit(78 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV else 1)
""",
    "weights after close": """
sub = shmsync.Subscriber(name)
kept = sub.weights["0", "weight"]
sub.close()
del sub
kept.fill_(1)
""",
}
PUBLISHERS_OWN = ("a publisher's weights", "adopted parameters in a forked child")


@pytest.fixture
def arena(name):
    with shmsync.Publisher(Net(0), name=name) as pub:
        yield pub
    segment_path(f"{name}-own").unlink(missing_ok=True)  # of a publisher that was killed


def died(arena, program, expected=-signal.SIGSEGV):
    """Run it in a separate process; what it wrote to stderr."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, arena.name], capture_output=True, text=True, timeout=240, cwd="/"
    )
    assert result.returncode == expected, result.stderr
    return result.stderr


def lines_of_ours(stderr):
    return [line for line in stderr.splitlines() if OURS in line]


@pytest.mark.parametrize("way", first(WAYS, 2))
def test_a_write_into_read_only_weights_says_which_and_what_to_do(arena, way):
    stderr = died(arena, WAYS[way], 78 if "fork" in way else -signal.SIGSEGV)
    (line,) = lines_of_ours(stderr)
    own = way in PUBLISHERS_OWN
    assert f"arena '{arena.name}{'-own' if own else ''}'" in line
    assert "read-only" in line and "snapshot()" in line and "update()" in line


@pytest.mark.parametrize("order", first(["before", "after"]))
def test_faulthandler_still_prints_its_traceback(arena, order):
    attach, enable = "sub = shmsync.Subscriber(name)\n", "faulthandler.enable()\n"
    start = enable + attach if order == "before" else attach + enable
    stderr = died(arena, start + "sub.weights['0', 'weight'].fill_(1)")
    assert len(lines_of_ours(stderr)) == 1
    assert stderr.count("Fatal Python error: Segmentation fault") == 1
    assert 'File "<string>", line' in stderr


@pytest.mark.full  # the one before has it on
def test_faulthandler_switched_off_and_on_again_prints_still(arena):
    program = """
faulthandler.enable()
sub = shmsync.Subscriber(name)
faulthandler.disable()
faulthandler.enable()
other = shmsync.Subscriber(name)
other.weights['0', 'weight'].fill_(1)
"""
    stderr = died(arena, program)
    assert stderr.count("Fatal Python error: Segmentation fault") == 1


@pytest.mark.parametrize("order", first(["before", "after"]))
def test_a_handler_of_the_users_own_is_still_called_with_the_fault(arena, order):
    attach, install = "sub = shmsync.Subscriber(name)\n", "install()\n"
    start = install + attach if order == "before" else attach + install
    stderr = died(
        arena,
        USERS_HANDLER + start + "print(hex(sub.weights['0', 'weight'].data_ptr()))\nsys.stdout.flush()\n"
        "at = sub.weights['0', 'weight'].data_ptr()\nos.write(2, b'%#x\\n' % at)\nctypes.memset(at, 1, 1)",
        77,
    )
    address = stderr.splitlines()[0]
    assert f"the user's handler: {int(signal.SIGSEGV)} at {address}" in stderr
    assert len(lines_of_ours(stderr)) == (order == "before")  # a later handler that does not chain decides


@pytest.mark.parametrize("handlers", first(["none", "faulthandler", "user"]))
def test_a_fault_elsewhere_has_no_line_of_ours(arena, handlers):
    before = {"none": "", "faulthandler": "faulthandler.enable()\n", "user": USERS_HANDLER + "install()\n"}[handlers]
    stderr = died(
        arena, before + "sub = shmsync.Subscriber(name)\nelsewhere()", 77 if handlers == "user" else -signal.SIGSEGV
    )
    assert not lines_of_ours(stderr)
    if handlers == "faulthandler":
        assert "Fatal Python error: Segmentation fault" in stderr
    if handlers == "user":
        assert "at 0x40" in stderr


@pytest.mark.parametrize("signum", first([signal.SIGSEGV, signal.SIGBUS]))
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_that_was_only_sent_does_what_it_did(arena, signum, ignored):
    ignore = f"signal.signal({int(signum)}, signal.SIG_IGN)\n" if ignored else ""
    program = f"{ignore}sub = shmsync.Subscriber(name)\nos.kill(os.getpid(), {int(signum)})\nos._exit(5)"
    assert not lines_of_ours(died(arena, program, 5 if ignored else -signum))


def test_a_real_fault_ends_a_process_that_ignores_the_signal(arena):
    program = "signal.signal(signal.SIGSEGV, signal.SIG_IGN)\nsub = shmsync.Subscriber(name)\nelsewhere()"
    assert not lines_of_ours(died(arena, program))


def test_the_handler_comes_with_the_first_arena_and_knows_those_that_are_gone(arena):
    program = """
def current():
    seen = (ctypes.c_uint64 * 32)()
    assert libc.sigaction(signal.SIGSEGV, None, seen) == 0
    return seen[0]
assert current() == 0
sub = shmsync.Subscriber(name)
ours = current()
assert ours != 0
for _ in range(3):
    sub.close()
    sub = shmsync.Subscriber(name)
assert current() == ours
begin = sub.weights["0", "weight"].data_ptr()
sub.close()
del sub
libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(ctypes.c_void_p(begin // 4096 * 4096), 4096, 1, 0x32, -1, 0)  # the same place, read-only, private
assert at == begin // 4096 * 4096
ctypes.memset(at, 1, 1)
"""
    assert not lines_of_ours(died(arena, program))


def test_a_thread_that_faults_is_told_too(arena):
    program = """
import threading
sub = shmsync.Subscriber(name)
thread = threading.Thread(target=lambda: sub.weights["0", "weight"].fill_(1))
thread.start()
thread.join()
"""
    assert len(lines_of_ours(died(arena, program))) == 1


@pytest.mark.full  # the tests around it have one process
def test_many_children_of_a_fork_each_say_it(arena):
    program = """
sub = shmsync.Subscriber(name)
weight = sub.weights["0", "weight"]
for _ in range(3):
    child = os.fork()
    if child == 0:
        weight.fill_(1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
sub.close()
"""
    assert len(lines_of_ours(died(arena, program, 0))) == 3
