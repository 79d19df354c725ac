"""Workers that are killed or stopped, with real signals, at each step of a send."""

import math
import os
import signal
import time

import pytest

from shmsync.errors import AckTimeout, WorkerDied
from support.calls import Call, naming
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.table import (
    MP,
    only,
)
from support.processes import until

LONG = 60.0  # seconds; a send that notices a death returns long before


def raises_worker_died(sending, since):
    """The send must end with the death of worker 1, and not with its deadline."""
    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+") as died:
        sending.result()
    assert time.monotonic() - since < LONG / 2
    assert died.value.missing == [1]
    return died.value


def kill(worker):
    """Without waiting for its end, which is the sender's to notice; the time."""
    os.kill(worker.pid, signal.SIGKILL)
    return time.monotonic()


def goes_on_without(fleet, sender, version):
    """The others have this version, and the next send reaches them."""
    assert fleet.stamps(workers=[0, 2]) == [version, version]
    assert sender.send(Stamped(version + 1), timeout=LONG) == version + 1
    assert fleet.stamps(workers=[0, 2]) == [version + 1, version + 1]
    assert sender.is_dead(1)


@pytest.mark.parametrize("before", ["it is registered", "it receives"])
def test_worker_killed_before(fleet, before):
    sender, version = fleet.open(), 1
    if before == "it receives":
        version += sender.send(Stamped(1))
    fleet.hold(1)
    sending = Call(sender.send, Stamped(version), timeout=LONG if version == 1 else math.inf)
    until(lambda: fleet.stamps(workers=[0, 2]) == [version, version])
    assert raises_worker_died(sending, kill(fleet.workers[1])).version == version
    goes_on_without(fleet, sender, version)


def is_noticed_when_applied(fleet, note, die):
    """Worker 1 dies in this way when it has applied what was sent, which it has noted."""
    sender = fleet.open()
    sender.send(Stamped(1))
    fleet.hold(1)
    die()
    sending = Call(sender.send, Stamped(2), timeout=LONG)
    fleet.workers[1].process.join()
    raises_worker_died(sending, time.monotonic())
    assert note.read_text() == "2"
    goes_on_without(fleet, sender, 2)


def test_worker_killed_between_apply_and_ack(fleet, tmp_path):
    note = tmp_path / "applied"
    is_noticed_when_applied(fleet, note, lambda: fleet.workers[1].start(peers.die_at_ack, 0, note))


def test_worker_killed_after_its_ack_has_applied(fleet, tmp_path):
    sender = fleet.open()
    sender.send(Stamped(1))
    fleet.hold(1)
    fleet.workers[1].start(peers.die_at_ack, 1, tmp_path / "applied")
    assert sender.send(Stamped(2), timeout=LONG) == 2
    fleet.workers[1].process.join()
    raises_worker_died(Call(sender.send, Stamped(3), timeout=LONG), time.monotonic())
    goes_on_without(fleet, sender, 3)


def test_worker_started_anew_takes_the_place_of_the_dead(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    fleet.workers[1].kill()
    raises_worker_died(Call(sender.send, Stamped(2), timeout=LONG), time.monotonic())
    fleet.replace(1)
    fleet.register(sender, 1)
    fleet.join(1, fleet.schemes[0])
    assert sender.resend() == 2
    assert fleet.stamps() == [2, 2, 2]
    assert sender.send(Stamped(3)) == 3
    assert fleet.stamps() == [3, 3, 3]


@pytest.mark.host_memory(reason="a worker that is stopped just after a section on a device still holds its slot")
def test_stopped_worker_is_late_and_its_late_ack_counts_for_nothing(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    worker = fleet.workers[1]
    for version in (2, 3):  # the second time, the first late ack lies in the pipe
        worker.stop()
        began = time.monotonic()
        sender.send_async(Stamped(version))
        assert fleet.stamps(workers=[0, 2]) == [version, version]
        with pytest.raises(AckTimeout, match=rf"stopped: worker 1 \(pid {worker.pid}\)") as late:
            sender.wait_async(timeout=0.1)
        assert time.monotonic() - began >= 0.1
        assert (late.value.missing, late.value.version) == ([1], version)
        worker.resume()
        assert fleet.stamps(workers=[1]) == [version]
    assert sender.send(Stamped(4), timeout=LONG) == 4
    assert fleet.stamps() == [4, 4, 4]
    assert fleet.versions() == [4, 4, 4]


LARGE = 1 << 20  # columns: 8 MiB in a message, far more than a pipe holds


@only(MP)
def test_stopped_worker_does_not_block_a_send_that_its_pipe_cannot_hold(fleet):
    sender = fleet.open("policy", Stamped, 0, LARGE)
    fleet.workers[1].stop()
    for version in (1, 2):
        with naming(AckTimeout, [1]):
            sender.send(Stamped(version, LARGE), timeout=2)
    assert fleet.stamps(workers=[0, 2]) == [2, 2]
    fleet.workers[1].resume()
    assert sender.send(Stamped(3, LARGE), timeout=LONG) == 3
    assert fleet.stamps() == [3, 3, 3]


def test_what_a_worker_had_applied_is_not_counted_for_the_one_in_its_place(fleet):
    sender = fleet.open()
    assert sender.send(Stamped(1)) == 1
    fleet.workers[1].kill()
    fleet.replace(1)
    fleet.register(sender, 1)
    assert fleet.workers[1].finish() == 0  # it exits before it has received anything
    with naming(WorkerDied, [1]):
        sender.resend(timeout=LONG)
    assert fleet.stamps(workers=[0, 2]) == [1, 1]
