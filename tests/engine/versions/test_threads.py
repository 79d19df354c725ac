"""Several threads use one subscriber: each has the version of what it computed, whatever the others apply meanwhile."""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs.engine import count_for_ever, open_counting
from support.processes import until
from support.weights import Counting

THREADS = 8
ROUNDS = 120
X = torch.ones(1)


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def counting(start):
    """counting(slots, consistency) -> a module bound to weights that another process counts up, and its subscriber."""
    made = []

    def make(slots, consistency="pinned", **options):
        trainer = start()
        sub = shmsync.Subscriber(trainer.call(open_counting, slots=slots), consistency=consistency, timeout=120)
        made.append(sub)
        policy = sub.bind(Counting(), **options)
        trainer.start(count_for_ever)
        return policy, sub

    yield make
    for sub in made:
        sub.close()


def then(call):
    """What `call` computes, and then the thread's version."""

    def way(policy, sub):
        out = call(policy, sub)
        return out, sub.version

    return way


def in_section(policy, sub):
    while True:
        with sub.read() as section:
            out = policy(X)
        if not section.torn:
            assert sub.version == section.version
            return out, section.version


def version_in_section(policy, sub):
    while True:
        with sub.read() as section:
            out, version = policy(X), sub.version
        if not section.torn:
            return out, version


def half_a_generator(policy, sub):
    steps = policy.stream(X)
    out = next(steps)
    inside = sub.version
    steps.close()
    assert sub.version == inside
    return out, inside


def snapshot(policy, sub):
    weights, version = sub.snapshot()
    assert sub.version == version
    return weights["first", "weight"].mean(), version


WAYS = {
    "call": then(lambda policy, sub: policy(X)),
    "forward": then(lambda policy, sub: policy.forward(X)),
    "method": then(lambda policy, sub: policy.act(X)),
    "submodule": then(lambda policy, sub: policy.first(X)),
    "submodule's method": then(lambda policy, sub: policy.last.act(X)),
    "generator": then(lambda policy, sub: list(policy.stream(X))[-1]),
    "generator that is returned": then(lambda policy, sub: list(policy.lazily(X))[-1]),
    "half a generator": half_a_generator,
    "section": in_section,
    "version in a section": version_in_section,
    "run": then(lambda policy, sub: sub.run(policy, X)),
    "run of a method": then(lambda policy, sub: sub.run(policy.act, x=X)),
    "run with its version": lambda policy, sub: sub.run(policy, X, with_version=True),
    "run without its version": then(lambda policy, sub: sub.run(policy, X, with_version=False)),
    "run inside a section": lambda policy, sub: sub.run(sub.run, policy, X, with_version=True),
    "snapshot": snapshot,
}


def wrong_labels(ways, policy, sub, number):
    """Which ways gave a result another label than its version, and how often."""
    wrong, order = Counter(), list(ways)
    with torch.no_grad():
        for step in range(ROUNDS):
            for at in range(len(order)):
                way = order[(at + step + number) % len(order)]
                out, version = ways[way](policy, sub)
                if float(out) != version:
                    wrong[way, float(out) - version] += 1
    return wrong


def in_threads(function, count=THREADS):
    """[function(0), function(1), ...], each in a separate thread, at the same time."""
    return [call.result() for call in [Call(function, number) for number in range(count)]]


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
@pytest.mark.parametrize("slots", [1, 2])
def test_each_label_is_of_its_own_result(counting, slots, consistency):
    policy, sub = counting(slots, consistency)
    assert in_threads(lambda number: wrong_labels(WAYS, policy, sub, number)) == [Counter()] * THREADS
    assert sub.stats().moves > 10


@pytest.mark.parametrize("slots", [1, 2])
def test_live_sections_label_what_they_saw_first(counting, slots):
    _, sub = counting(slots, "live", guard=False)

    def differences(number):
        found = 0
        for _ in range(ROUNDS * 10):
            with sub.read() as section:
                inside = sub.version
            found += not inside == section.version == sub.version
        return found

    assert in_threads(differences) == [0] * THREADS


def test_labels_of_a_module_of_two_arenas(start):
    trainers = [start(), start()]
    handles = [
        trainer.call(open_counting, slots=2, include=[part])
        for trainer, part in zip(trainers, ("first.*", "last.*"), strict=True)
    ]
    with shmsync.Subscriber(handles[0]) as first, shmsync.Subscriber(handles[1]) as last:
        policy = Counting()
        for sub in (first, last):
            sub.bind(policy)
        for trainer in trainers:
            trainer.start(count_for_ever)

        def wrong(number):
            found = 0
            with torch.no_grad():
                for _ in range(ROUNDS * 5):
                    found += float(policy(X)) != (first.version + last.version) / 2
            return found

        assert in_threads(wrong) == [0] * THREADS


def test_a_thread_that_has_used_nothing_sees_what_is_applied(counting):
    policy, sub = counting(2)  # made and bound in this thread, which is no use of it
    policy.requires_grad_(False)
    before = sub.version
    until(lambda: Call(policy, X).result() > before)
    assert before < sub.version == sub.stats().version
    policy(X)
    mine = sub.version
    until(lambda: Call(policy, X).result() > mine)
    assert sub.version == mine < sub.stats().version  # still that of what this thread computed
    assert sub.refresh() or sub.version == sub.stats().version > mine
    assert f"version {sub.stats().version} of" in repr(sub)


def test_refresh_moves_the_label_though_another_thread_applied_the_version():
    with shmsync.Publisher(Counting(), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        with sub.read():
            pass
        pub.publish()
        assert Call(sub.refresh).result() is True
        assert (sub.version, sub.wait_version(2), sub.version) == (1, 2, 1)
        assert sub.refresh() is False  # there is nothing to apply
        assert (sub.version, sub.lag) == (2, 0)


def test_refresh_inside_a_section_keeps_its_label():
    with shmsync.Publisher(Counting(), slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        with sub.read() as section:
            pub.publish()
            assert sub.refresh() is False
            assert sub.version == section.version == 1
        sub.bind(Counting())  # enters a section to move its tensors
        assert sub.version == sub.stats().version == 2


def test_a_version_of_two_sessions(start, name):
    """A result keeps the version and the session that it was computed with, when another thread has moved on."""
    trainer = start()
    old = trainer.call(open_counting, name=name)
    with shmsync.Subscriber(name, follow=True) as sub:
        policy = sub.bind(Counting())
        with torch.no_grad():
            policy(X)
            trainer.kill()
            new = start().call(open_counting, 7, name=name)
            until(lambda: Call(sub.refresh).result())
            assert (sub.version, sub.session) == (1, old.session)
            assert Call(lambda: (sub.version, sub.session)).result() == (7, new.session)
            policy(X)
            assert (sub.version, sub.session) == (7, new.session)


@pytest.mark.full  # seconds
def test_what_ends_is_not_kept():
    with shmsync.Publisher(Counting()) as pub, shmsync.Subscriber(pub.handle) as sub:

        def use():
            with sub.read():
                pass
            return sub.version

        def memory():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1])

        def short_threads(count):
            for _ in range(count):
                Call(use).result()

        def short_subscribers(count):
            for _ in range(count):
                with shmsync.Subscriber(pub.handle) as other, other.read():
                    pass

        for many, count, allowed in ((short_threads, 10_000, 256), (short_subscribers, 300, 512)):
            many(count // 10)
            before = memory()
            many(count)
            assert memory() - before < allowed  # pages


def test_the_label_outlives_close_and_is_inherited_by_no_other_subscriber():
    with shmsync.Publisher(Counting(), slots=2) as pub:
        for _ in range(20):
            with shmsync.Subscriber(pub.handle) as sub:
                assert sub.version == pub.version
                with sub.read():
                    pass
            assert sub.version == pub.version  # closed
            del sub
            pub.publish()
