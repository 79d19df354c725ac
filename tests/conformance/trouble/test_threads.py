"""Several threads, one sender: one send at a time, each within its own deadline, and every version is one send's."""

from __future__ import annotations

import pytest

from support.calls import Call, overrun
from support.conformance.nets import Stamped
from support.processes import until_waits


def send_from_threads(sender, threads, rounds):
    """Each thread sends its own numbers; [(version, number)] of all sends, in the order of their versions."""

    def send(first):
        return [(sender.send(Stamped(number)), number) for number in range(first, first + rounds)]

    calls = [Call(send, 1 + rounds * thread) for thread in range(threads)]
    return sorted(pair for call in calls for pair in call.result())


def test_threads_take_turns_and_every_send_has_a_version_of_its_own(fleet):
    sender = fleet.open(timeout=120.0)
    found = send_from_threads(sender, 3, 5)
    versions, numbers = zip(*found, strict=True)
    assert len(set(versions)) == 15 and sorted(numbers) == list(range(1, 16))
    assert fleet.stamps() == [numbers[-1]] * 3  # the newest version is what the last send sent


@pytest.mark.parametrize("call", ["send", "send_async", "wait_async"])
def test_a_second_thread_gives_up_at_its_own_deadline_and_nothing_was_sent(fleet, call):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    fleet.hold(1)
    other = Call(sender.send, Stamped(2))
    until_waits(other, "send")
    given = [] if call == "wait_async" else [Stamped(7)]
    said, late = overrun(lambda: getattr(sender, call)(*given, timeout=0.3), 0.3)
    assert said == {"WriterBusy"} and late < 0.1 and other.is_alive()
    fleet.release(1)
    other.result()
    sender.send(Stamped(3))
    assert fleet.stamps() == [3, 3, 3]


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
