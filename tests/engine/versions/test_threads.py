"""Several threads use one subscriber: each has the version of what it computed, whatever the others apply meanwhile."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs.engine import count, open_counting
from support.processes import until
from support.weights import Counting


def count_for_ever(state):
    while True:
        count(state)
        time.sleep(0.0003)


THREADS = 4
ROUNDS = 60
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


def snapshot(policy, sub):
    weights, version = sub.snapshot()
    assert sub.version == version
    return weights["first", "weight"].mean(), version


WAYS = {
    "call": then(lambda policy, sub: policy(X)),
    "forward": then(lambda policy, sub: policy.forward(X)),
    "method": then(lambda policy, sub: policy.act(X)),
    "submodule": then(lambda policy, sub: policy.first(X)),
    "section": in_section,
    "run": then(lambda policy, sub: sub.run(policy, X)),
    "run with its version": lambda policy, sub: sub.run(policy, X, with_version=True),
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


TORN = pytest.param(
    1, "optimistic", marks=pytest.mark.host_memory(reason="a device's copies are so slow that most sections are torn")
)


@pytest.mark.parametrize(("slots", "consistency"), [(1, "pinned"), (2, "pinned"), TORN])
def test_each_label_is_of_its_own_result(counting, slots, consistency):
    policy, sub = counting(slots, consistency)
    while sub.stats().moves <= 10:  # the trainer may start late
        assert in_threads(lambda number: wrong_labels(WAYS, policy, sub, number)) == [Counter()] * THREADS


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
