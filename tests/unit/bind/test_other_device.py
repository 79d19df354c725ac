"""A worker's module on another device than the arena: its private copy of each version is never a torn one."""

import threading

import pytest

from shmsync import Publisher, Subscriber
from support.calls import Call
from support.conformance.nets import Stamped, ask
from support.jobs.engine import bind_copies

SLOTS = [("pinned", 1), ("pinned", 2), ("pinned", 3), ("optimistic", 1), ("optimistic", 2)]


@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
def test_forward_sees_whole_versions_while_the_trainer_writes(consistency, slots):
    with Publisher(Stamped(1), slots=slots) as pub, Subscriber(pub.handle, consistency=consistency) as sub:
        net, over, seen = bind_copies(sub, Stamped(0)), threading.Event(), []

        def look():
            while not over.is_set():
                seen.append(ask(net))

        looking = Call(look)
        for value in range(2, 200):
            pub.publish(Stamped(value), timeout=60)
        over.set()
        looking.result()
        assert seen and all(isinstance(value, int) for value in seen)  # a pair would be two versions
        assert seen == sorted(seen)
        assert ask(net) == 199
