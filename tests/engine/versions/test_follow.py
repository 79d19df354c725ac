"""A trainer that dies, or closes, and restarts under its name: a follower goes on with the new weights."""

from __future__ import annotations

from math import inf as for_ever

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs.engine import begin_update, close_publisher, open_arena, publish, read
from support.processes import until, until_waits
from support.weights import Net, stamped


def open_net(state, seed, **kwargs):
    """A publisher of a module."""
    state.pub = shmsync.Publisher(Net(seed), **kwargs)


def publish_net(state, seed):
    return state.pub.publish(Net(seed))


def open_other_layout(state, name):
    """A publisher of other leaves than open_arena() has."""
    weights = {**stamped(7), "extra": torch.zeros(3), "large": torch.zeros(5)}
    state.pub = shmsync.Publisher(weights, name=name)


def outputs(seed):
    with torch.no_grad():
        return Net(seed).eval()(torch.ones(2, 6))


@pytest.fixture
def follower():
    made = []

    def make(source, **kwargs):
        made.append(shmsync.Subscriber(source, follow=True, **kwargs))
        return made[-1]

    yield make
    for sub in made:
        sub.close()


END = {"killed": lambda trainer: trainer.kill(), "closed": lambda trainer: trainer.call(close_publisher)}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("end", END)
def test_a_follower_moves_to_the_arena_of_a_new_trainer(open_trainer, name, follower, end, slots):
    trainer = open_trainer(5, slots=slots)
    sub = follower(name if end == "closed" else trainer.handle, worker=3)
    stale = sub.weights
    assert (read(sub), sub.publisher_alive, sub.session) == ((5, 5, 5), True, trainer.handle.session)
    END[end](trainer)
    until(lambda: not sub.publisher_alive)
    assert read(sub) == (5, 5, 5)  # no publisher is back yet
    assert not sub.refresh()
    assert (sub.version, sub.lag) == (5, 0)
    trainer = open_trainer(2, slots=3 - slots)  # the number of slots may be another one
    until(sub.refresh)
    assert (sub.version, sub.latest, sub.lag) == (2, 2, 0)
    assert (read(sub), sub.publisher_alive, sub.session) == ((2, 2, 2), True, trainer.handle.session)
    assert sub.stats().restarts == 1
    assert (stale["large"] == 5).all()  # what was taken before stays readable
    trainer.start(publish, 3, wait=[3])
    until(sub.refresh)
    assert trainer.result() == 3
    assert read(sub) == (3, 3, 3)


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_a_bound_module_moves_by_being_called(start, name, follower, consistency):
    trainer = start()
    trainer.call(open_net, 1, name=name)
    sub = follower(name, consistency=consistency)
    module = sub.bind(Net(9)).eval()
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(module(x), outputs(1))
        trainer.kill()
        assert torch.equal(module(x), outputs(1))
        version = 1
        for seed, slots in ((2, 3), (3, 2)):  # more than once, with other numbers of slots
            trainer = start()
            trainer.call(open_net, seed, name=name, slots=slots)
            call_until_moved(module, x, sub)
            assert torch.equal(module(x), outputs(seed))
            assert torch.equal(sub.weights["0", "weight"], Net(seed)[0].weight)
            assert sub.version == version + 1  # the numbers go on
            for later in range(10 * seed, 10 * seed + slots):  # each slot is shown
                version = trainer.call(publish_net, later)
                assert torch.equal(module(x), outputs(later))
            trainer.kill()
    assert sub.stats().moves == 3 + 3 + 2
    assert sub.stats().reads > 3


def call_until_moved(module, x, sub):
    restarts = sub.stats().restarts
    until(lambda: sub.stats().restarts > restarts or module(x) is None)


def test_a_trainer_killed_in_the_middle_of_a_write(open_trainer, name, follower):
    trainer = open_trainer(4)
    sub = follower(name)
    trainer.call(begin_update, 5)
    trainer.kill()
    with pytest.raises(shmsync.Poisoned, match="died in the middle of version 5"), sub.read(timeout=0.1):
        pass
    reading = Call(read, sub)  # waits for the next trainer
    until_waits(reading, "_enter_slowly")
    open_trainer(1)
    assert reading.result() == (1, 1, 1)
    assert sub.refresh() is False


def test_wait_version_waits_for_a_trainer_that_comes_back(open_trainer, name, follower):
    trainer = open_trainer(5)
    sub = follower(name)
    waiting = Call(sub.wait_version, 6, timeout=for_ever)
    until_waits(waiting, "_wait_for")
    trainer.kill()
    until(lambda: not sub.publisher_alive)
    trainer = open_trainer(1)
    assert waiting.result() == 1  # it has moved on to the new arena, whose every version is newer than 5
    assert (sub.session, sub.latest, sub.version) == (trainer.handle.session, 1, 0)  # and applied nothing
    assert (sub.weights["large"] == 5).all()
    trainer.call(publish, 2)
    assert read(sub) == (2, 2, 2)


@pytest.mark.parametrize("end", END)
def test_a_follower_may_start_while_no_trainer_runs(open_trainer, name, end):
    END[end](open_trainer(5))
    for follow in (True, False):
        with pytest.raises((shmsync.WriterDied, shmsync.ArenaNotFound)):  # a publisher of another test may sweep it
            shmsync.Subscriber(name, follow=follow, timeout=0.2)
    attaching = Call(shmsync.Subscriber, name, follow=True, timeout=60.0)
    until_waits(attaching, "attach")
    open_trainer(2)
    with attaching.result() as sub:
        assert read(sub) == (2, 2, 2)


def test_a_section_keeps_the_arena_it_has_entered(open_trainer, name, follower):
    trainer = open_trainer(5, slots=2)
    sub = follower(name)
    with sub.read() as section:
        trainer.kill()
        trainer = open_trainer(2, slots=2)
        until(lambda: not sub.publisher_alive)
        assert not sub.refresh()
        with pytest.raises(shmsync.WriterDied):
            sub.wait_version(6, timeout=for_ever)
        assert (section.version, section.weights["scalar"].item()) == (5, 5)
    until(sub.refresh)
    assert read(sub) == (2, 2, 2)


def test_another_layout_is_named_and_the_old_weights_stay(open_trainer, start, name, follower):
    trainer = open_trainer(5)
    sub = follower(name)
    trainer.kill()
    trainer = start()
    trainer.call(open_other_layout, name)
    until(lambda: not sub.publisher_alive)
    for call in (sub.refresh, lambda: sub.wait_version(6)):
        for _ in range(2):
            with pytest.raises(shmsync.ManifestMismatch, match="extra is new.*large was") as error:
                call()
            assert name in str(error.value)
    with pytest.warns(RuntimeWarning, match="extra is new"):
        until(lambda: read(sub) != (5, 5, 5) or warned(sub))
    assert read(sub) == (5, 5, 5)
    trainer.call(close_publisher)
    trainer.call(open_arena, 3, name=name)  # the right one in the end
    until(sub.refresh)
    assert read(sub) == (3, 3, 3)


def warned(sub):
    return sub._reader._successor._warned is not None
