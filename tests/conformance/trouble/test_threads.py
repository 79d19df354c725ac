"""Several threads, one sender: one send at a time, each within its own deadline, and every version is one send's."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

import shmsync
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance import calls_of_senders as calls
from support.conformance.nets import Stamped
from support.conformance.table import in_processes, over_pipes
from support.processes import until_waits


@in_processes
def test_threads_take_turns_and_every_send_has_a_version_of_its_own(fleet):
    sender = fleet.open(timeout=120.0)
    found = fleet.with_sender(sender, calls.send_from_threads, 3, 5)
    versions, numbers = zip(*found, strict=True)
    assert len(set(versions)) == 15 and sorted(numbers) == list(range(1, 16))
    assert fleet.get([numbers[-1]] * 3, None)  # the newest version is what the last send sent


@in_processes
@pytest.mark.parametrize("call", ["send", "send_async", "wait_async"])
def test_a_second_thread_gives_up_at_its_own_deadline_and_nothing_was_sent(fleet, call):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    fleet.hold(1)
    said, late = fleet.with_sender(sender, calls.overrun_beside, call, 0.3)
    assert said == {"WriterBusy"} and late < 0.1
    fleet.release(1)
    sender.send(Stamped(3))
    assert fleet.get([3, 3, 3], None)


@in_processes
def test_a_send_in_a_signal_handler_of_a_send_is_refused_at_once(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    fleet.hold(1)
    inner, outer = fleet.with_sender(sender, calls.send_in_handler, 1.0)
    assert [said for said, _ in inner] == ["WriterBusy"]
    assert outer[0] == "AckTimeout"
    fleet.release(1)
    sender.send(Stamped(3), timeout=60)
    assert fleet.get([3, 3, 3], None)


@in_processes
@over_pipes
@pytest.mark.parametrize("schemes", ["one", "several"])
def test_senders_of_several_models_share_the_pipes_in_several_threads(fleet, schemes):
    shared = fleet.make(timeout=60.0) if schemes == "one" else None
    senders = {model_id: fleet.open(model_id, scheme=shared, timeout=60.0) for model_id in "abc"}

    def send(sender):
        return [sender.send(Stamped(number)) for number in range(1, 31)]

    sending = {model_id: Call(send, sender) for model_id, sender in senders.items()}
    for model_id, call in sending.items():
        assert call.result() == list(range(1, 31))
        assert fleet.stamps(model_id) == [30, 30, 30]


@in_processes
@over_pipes
def test_senders_of_one_model_share_the_pipes_in_several_threads(fleet):
    first = fleet.open(timeout=60.0)
    others = [fleet.make(timeout=60.0) for _ in range(2)]
    for scheme in others:
        fleet.init_sender(scheme)
    senders = [first, *(scheme.get_sender() for scheme in others)]

    def send(sender, base):
        return [(sender.send(Stamped(number)), number) for number in range(base, base + 20)]

    sending = [Call(send, sender, 100 * (index + 1)) for index, sender in enumerate(senders)]
    found = sorted(pair for call in sending for pair in call.result())
    assert len({version for version, _ in found}) == 60
    assert fleet.stamps() == [found[-1][1]] * 3


@in_processes
@over_pipes
def test_every_call_of_a_sender_waits_for_its_turn(fleet):
    a, b = fleet.open("a"), fleet.open("b")
    for each in (a, b):
        each.send(Stamped(1))
    fleet.hold(2)
    other = Call(calls.outcome_of, a, "send", 1.0)
    until_waits(other, "send")
    for call in (
        lambda: a.send(Stamped(5), timeout=0.1),
        lambda: a.send_async(Stamped(5), timeout=0.1),
        lambda: a.wait_async(timeout=0.1),
        lambda: a.resend(timeout=0.1),
    ):
        with pytest.raises(shmsync.WriterBusy, match="nothing was sent"):
            call()
    assert other.result()[0] == "AckTimeout"
    fleet.release(2)
    for each in (a, b):
        each.send(Stamped(6), timeout=60)
    assert [fleet.stamps(model_id) for model_id in "ab"] == [[6, 6, 6]] * 2


class Sends:
    """In place of the weights: preparing them sends."""

    def prepare_weights(self, weights, model_id, strategy, context=None):
        with pytest.raises(shmsync.WriterBusy, match="same thread"):
            self.get_sender().send(Stamped(2))
        self.refused = True
        return super().prepare_weights(weights, model_id, strategy, context)


@pytest.mark.parametrize("kind", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_a_send_inside_prepare_weights_is_refused_at_once(kind):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        scheme = type("Sending", (Sends, kind), {})()
        scheme.init_on_sender("policy", pipes=[ours])
        with pytest.raises(shmsync.AckTimeout):
            scheme.get_sender().send(Stamped(1), timeout=0.1)
        assert scheme.refused
        scheme.shutdown()


def test_a_waiting_thread_is_served_before_the_one_that_comes_again():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        scheme = MultiProcessWeightSyncScheme()
        scheme.init_on_sender("policy", pipes=[ours], procs=None)
        (send_lock,) = scheme.get_sender().send_locks()[:1]
        order, inside = [], threading.Event()

        def take(name):
            with shmsync._native.ScopedLock([send_lock.lock], float("inf"), "inside", "late"):
                inside.set()
                order.append(name)

        with shmsync._native.ScopedLock([send_lock.lock], float("inf"), "inside", "late"):
            waiting = Call(take, "second")
            until_waits(waiting, "take")
        with shmsync._native.ScopedLock([send_lock.lock], float("inf"), "inside", "late"):
            order.append("first again")
        waiting.result()
        assert order == ["second", "first again"]
