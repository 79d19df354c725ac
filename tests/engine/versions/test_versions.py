"""sub.versions(): one applied version after the other, and what ends the loop."""

from __future__ import annotations

from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import attach, close_publisher, count, open_counting, publish, refresh
from support.processes import until_waits
from support.weights import Counting, stamped, stamps


def tell_versions(state, fails):
    """Bind a module, and keep what on_version() calls with, and what the weights say in that call."""
    state.module, state.told = state.sub.bind(Counting()).requires_grad_(False), []

    def tell(version):
        says = state.sub.weights["first", "bias"], state.sub.state_dict()["last.bias"], state.module(0)
        state.told.append((version, *map(int, says)))
        if version == fails:
            raise OSError(f"version {version} has no place")

    state.sub.on_version(tell)


def call_module(state):
    return int(state.module(0)), state.told


def collect_versions(state, **kwargs):
    """Every version of the loop, the version of a section in its body, and what its weights say."""
    seen = []
    for version in state.sub.versions(**kwargs):
        with state.sub.read() as section:
            seen.append((version, section.version, *stamps(section.weights)))
    return seen


@pytest.mark.parametrize("slots", [1, 2])
def test_a_section_in_the_loop_has_that_version_or_a_newer_one(start, slots):
    worker = start()
    with shmsync.Publisher(stamped(1), slots=slots) as pub:
        worker.call(attach, pub.handle, worker=0)
        worker.start(collect_versions, timeout=for_ever)
        for version in range(2, 6):
            pub.publish(stamped(version), wait=True, timeout=for_ever)
    seen = worker.result()
    given = [version for version, *_ in seen]
    assert given == sorted(set(given))
    assert all(version <= read == low == high for version, read, low, high in seen)
    assert seen[-1][1] == 5  # a section that acks a version takes it from the loop, never the last one from both


def test_missed_versions_are_skipped_and_a_second_loop_begins_at_the_newest():
    with shmsync.Publisher(stamped(1), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        for version in range(2, 5):
            pub.publish(stamped(version))
        versions = sub.versions(timeout=0.05)
        assert next(versions) == 4
        pub.publish(stamped(5))
        pub.publish(stamped(6))
        assert next(versions) == 6
        with pytest.raises(shmsync.PublishTimeout, match="version 7"):
            next(versions)
        assert next(sub.versions()) == 6
        pub.publish(stamped(7))
        pub.close()
        assert list(sub.versions()) == [7]


def test_a_dead_publisher_is_an_error_unless_it_is_followed(open_trainer, name):
    trainer = open_trainer(7, slots=2)
    with shmsync.Subscriber(name) as sub, shmsync.Subscriber(name, follow=True) as follower:
        versions, followed = sub.versions(timeout=for_ever), follower.versions(timeout=for_ever)
        assert next(versions) == next(followed) == 7
        waiter = Call(next, followed)
        until_waits(waiter, "_wait_for")
        trainer.kill()
        with pytest.raises(shmsync.WriterDied):
            next(versions)
        again = open_trainer(2, slots=2)  # its versions begin again
        first = waiter.result()
        assert first in (1, 2)
        again.call(publish, 3)
        assert next(followed) in {2, 3} - {first}
        again.call(close_publisher)


def test_a_name_is_waited_for(open_trainer, start, name):
    worker = start()
    worker.start(attach, name, timeout=for_ever)
    open_trainer(first_version=3)  # there is no other version that it could find
    assert worker.result() == 3


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_function_is_called_once_for_each_version_before_its_first_use(start, name, slots, consistency):
    trainer, worker = start(), start()
    handle = trainer.call(open_counting, slots=slots, name=name)
    worker.call(attach, handle, consistency=consistency)
    worker.call(tell_versions, fails=2)
    told = [(1, 1, 1, 1)]
    for _ in range(2):
        assert worker.call(call_module) == (1, told)
    trainer.call(count)
    with pytest.raises(OSError, match="version 2 has no place"):
        worker.call(call_module)
    told.append((2, 2, 2, 2))
    assert worker.call(call_module) == (2, told)  # it counts as applied
    for version in (3, 4):
        trainer.call(count)
        told.append((version,) * 4)
        assert worker.call(refresh)
        assert worker.call(call_module) == (version, told)
