"""pub.verify(): every worker process proves what it holds, or is named."""

from __future__ import annotations

import threading
import time

import pytest

import shmsync
from support.jobs.engine import detach, enter, leave, refresh
from support.jobs.verifying import (
    bound,
    calls_for_ever,
    held_copy,
    policy,
    refreshes_for_ever,
    replace_head,
    scribble,
    sections_for_ever,
    set_data,
    verify_copy,
    verify_there,
    waits_for_ever,
)
from support.processes import until_waits

pytestmark = pytest.mark.host_memory(reason="test_sums_on_a_device.py has arenas on a device")


@pytest.fixture(params=[1, 2])
def pub(request):
    with shmsync.Publisher(policy(), slots=request.param, checksum=True) as made:
        yield made


WAYS = {each.__name__: each for each in (sections_for_ever, refreshes_for_ever, calls_for_ever, waits_for_ever)}


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
        if way != "waits_for_ever":  # who waits applies nothing
            pub.publish()
    for worker in workers:
        worker.interrupt(refresh)


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


def test_a_worker_whose_module_was_changed_before_the_next_version_is_named(pub, start):
    worker = start()
    worker.call(bound, pub.handle, 3)
    worker.call(replace_head)
    pub.publish()
    asked = threading.Thread(target=lambda: named.append(verify_error(pub)))
    named = []
    asked.start()
    until_waits(asked, "ask")
    with pytest.raises(shmsync.ManifestMismatch, match="were replaced"):
        worker.call(refresh)
    asked.join()
    assert isinstance(named[0], shmsync.NotDelivered)
    assert named[0].missing == [3]
    assert "was changed and cannot show it" in str(named[0])


def verify_error(pub, **kwargs):
    try:
        return pub.verify(**kwargs)
    except shmsync.ShmSyncError as error:
        return error


def test_the_late_the_stopped_and_the_absent_are_named(pub, start):
    idle, stopped = start(2)
    for index, worker in enumerate((idle, stopped)):
        worker.call(bound, pub.handle, index)
    stopped.stop()
    began = time.monotonic()
    error = verify_error(pub, timeout=0.2, workers=[0, 1, 7])
    assert isinstance(error, shmsync.AckTimeout)
    assert sorted(error.missing) == [0, 1, 7]
    assert time.monotonic() - began >= 0.2
    assert f"stopped: worker 1 (pid {stopped.pid})" in str(error)
    assert "worker 7 is not attached" in str(error)
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
    named = []
    asked = threading.Thread(target=lambda: named.append(verify_error(pub, timeout=60)))
    asked.start()
    until_waits(asked, "ask")
    leaving.call(detach)
    asked.join()
    assert isinstance(named[0], shmsync.WorkerDied)
    assert named[0].missing == [0]
    good.interrupt(refresh)


def test_inside_a_section_nobody_answers_and_the_next_one_does(pub, start):
    worker = start()
    worker.call(bound, pub.handle, 0)
    worker.call(enter)
    assert isinstance(verify_error(pub, timeout=0.1), shmsync.AckTimeout)
    worker.call(leave)
    named = []
    asked = threading.Thread(target=lambda: named.append(verify_error(pub)))
    asked.start()
    until_waits(asked, "ask")
    worker.call(enter)
    asked.join()
    assert named[0].workers == (0,)


def test_an_early_answer_counts_for_nothing_later(pub, start):
    worker = start()
    worker.call(bound, pub.handle, 0)
    worker.start(sections_for_ever)
    assert pub.verify().workers == (0,)
    worker.interrupt(scribble)
    assert isinstance(verify_error(pub, timeout=0.1), shmsync.AckTimeout)  # its answer of before stands in its row


def test_two_threads_ask_one_after_the_other(pub, start):
    worker = start()
    worker.call(bound, pub.handle, 0)
    worker.start(sections_for_ever)
    found = []
    threads = [threading.Thread(target=lambda: found.append(verify_error(pub))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.workers for each in found] == [(0,)] * 4
    worker.interrupt(refresh)


def test_own_sections_and_closing(pub):
    sub = shmsync.Subscriber(pub.handle, worker=0)
    with sub.read(), pytest.raises(shmsync.ProtocolError, match="leave the section first"):
        pub.verify()
    named = []
    asked = threading.Thread(target=lambda: named.append(verify_error(pub, timeout=60)))
    asked.start()
    until_waits(asked, "ask")
    pub.close()
    asked.join()
    assert isinstance(named[0], shmsync.ClosedError)
    sub.close()


def test_nobody_is_a_proof_about_nobody(pub):
    assert pub.verify() == (1, 9, (), ())


def test_a_worker_that_computes_with_a_deep_copy(pub, start):
    worker = start()
    worker.call(bound, pub.handle, 0)
    worker.call(held_copy)
    assert worker.call(verify_copy).version == 1
    with pub.update() as weights:
        weights["2", "weight"].add_(1)
    with pytest.raises(shmsync.NotDelivered) as error:
        worker.call(verify_copy)
    assert error.value.leaves == ("2.weight",)


def test_a_worker_on_an_old_session(start):
    worker = start()
    with shmsync.Publisher(policy(), checksum=True) as old:
        worker.call(bound, old.handle, 0)
        name = old.name
    with shmsync.Publisher(policy(), name=name, checksum=True) as new:
        with pytest.raises(shmsync.NotDelivered, match="has taken its place"):
            worker.call(verify_there)
        error = verify_error(new, timeout=0.1, workers=[0])
        assert isinstance(error, shmsync.AckTimeout)
        assert error.missing == [0]
