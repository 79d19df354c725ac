"""pub.verify(): every worker process proves what it holds, or is named."""

from __future__ import annotations

import time

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import detach, enter, leave, refresh
from support.jobs.verifying import (
    bound,
    calls_for_ever,
    policy,
    refreshes_for_ever,
    replace_head,
    scribble,
    sections_for_ever,
    set_data,
    waits_for_ever,
)
from support.processes import until_waits

pytestmark = pytest.mark.host_memory(reason="test_sums_on_a_device.py has arenas on a device")


@pytest.fixture
def pub(request):
    with shmsync.Publisher(policy(), slots=getattr(request, "param", 1), checksum=True) as made:
        yield made


@pytest.fixture
def worker(pub, start):
    """Worker 0, whose module is bound to the weights."""
    made = start()
    made.call(bound, pub.handle, 0)
    return made


WAYS = {each.__name__: each for each in (sections_for_ever, refreshes_for_ever, calls_for_ever, waits_for_ever)}


@pytest.mark.parametrize("pub", [1, 2], indirect=True)  # slots
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
def test_every_worker_proves_what_it_holds(pub, start, way, consistency):
    workers = start(2)
    for index, worker in enumerate(workers):
        worker.call(bound, pub.handle, index, consistency)
        worker.start(WAYS[way])
    for _ in range(3):
        proof = pub.verify()
        assert (proof.version, proof.leaves, sorted(proof.workers)) == (pub.version, 9, [0, 1])
        if way != "waits_for_ever":  # a reader that waits applies nothing
            pub.publish()
    for worker in workers:
        worker.interrupt(refresh)


@pytest.mark.parametrize("pub", [1, 2], indirect=True)  # slots
@pytest.mark.parametrize(
    ("fault", "leaf"), [(replace_head, "2.weight"), (scribble, "1.running_mean"), (set_data, "2.weight")]
)
def test_a_worker_that_holds_something_else_is_named(pub, start, fault, leaf):
    good, bad = start(2)
    for index, worker in enumerate((good, bad)):
        worker.call(bound, pub.handle, index)
    bad.call(fault)
    for worker in (good, bad):
        worker.start(sections_for_ever)
    with pytest.raises(shmsync.NotDelivered, match=f"worker 1 holds something else in . place.s., such as {leaf}") as e:
        pub.verify()
    assert (e.value.missing, e.value.leaves, e.value.version) == ([1], (leaf,), 1)
    for worker in (good, bad):
        worker.interrupt(refresh)


def test_a_worker_whose_module_was_changed_before_the_next_version_is_named(pub, worker):
    worker.call(replace_head)
    pub.publish()
    asking = Call(pub.verify)
    until_waits(asking, "ask")
    with pytest.raises(shmsync.ManifestMismatch, match="were replaced"):
        worker.call(refresh)
    with pytest.raises(shmsync.NotDelivered, match="was changed and cannot show it") as caught:
        asking.result()
    assert caught.value.missing == [0]


def test_the_late_the_stopped_and_the_absent_are_named(pub, start):
    idle, stopped = start(2)
    for index, worker in enumerate((idle, stopped)):
        worker.call(bound, pub.handle, index)
    stopped.stop()
    began = time.monotonic()
    with pytest.raises(shmsync.AckTimeout, match="worker 7 is not attached") as caught:
        pub.verify(timeout=0.2, workers=[0, 1, 7])
    assert sorted(caught.value.missing) == [0, 1, 7]
    assert time.monotonic() - began >= 0.2
    assert f"stopped: worker 1 (pid {stopped.pid})" in str(caught.value)
    stopped.resume()
    for worker in (idle, stopped):
        worker.start(sections_for_ever)
    assert sorted(pub.verify().workers) == [0, 1]
    for worker in (idle, stopped):
        worker.interrupt(refresh)


def test_the_dead_are_named_and_those_who_leave_are_not_waited_for(pub, start):
    dying, leaving, good = start(3)
    for index, worker in enumerate((dying, leaving, good)):
        worker.call(bound, pub.handle, index)
    good.start(sections_for_ever)
    dying.kill()
    asking = Call(pub.verify, timeout=60)
    until_waits(asking, "ask")
    leaving.call(detach)
    with pytest.raises(shmsync.WorkerDied) as caught:
        asking.result()
    assert caught.value.missing == [0]
    good.interrupt(refresh)


def test_inside_a_section_nobody_answers_and_the_next_one_does(pub, worker):
    worker.call(enter)
    with pytest.raises(shmsync.AckTimeout):
        pub.verify(timeout=0.1)
    worker.call(leave)
    asking = Call(pub.verify)
    until_waits(asking, "ask")
    worker.call(enter)
    assert asking.result().workers == (0,)


def test_an_early_answer_counts_for_nothing_later(pub, worker):
    worker.start(sections_for_ever)
    assert pub.verify().workers == (0,)
    worker.interrupt(scribble)
    with pytest.raises(shmsync.AckTimeout):  # its answer of before stands in its row
        pub.verify(timeout=0.1)


def test_two_threads_ask_one_after_the_other(pub, worker):
    worker.start(sections_for_ever)
    asking = [Call(pub.verify) for _ in range(4)]
    assert [each.result().workers for each in asking] == [(0,)] * 4
    worker.interrupt(refresh)


def test_own_sections_and_closing(pub):
    sub = shmsync.Subscriber(pub.handle, worker=0)
    with sub.read(), pytest.raises(shmsync.ProtocolError, match="leave the section first"):
        pub.verify()
    asking = Call(pub.verify, timeout=60)
    until_waits(asking, "ask")
    pub.close()
    with pytest.raises(shmsync.ClosedError):
        asking.result()
    sub.close()


def test_nobody_is_a_proof_about_nobody(pub):
    assert pub.verify() == (1, 9, (), ())
