"""A signal handler that raises, at any moment: nothing stays locked, pinned or shut. And a close() beside a publish."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

import shmsync
from shmsync import WeightStrategy
from shmsync.memory.torch_modes import plainly
from support.calls import Call, meanwhile
from support.faults.interrupts import Interrupt, on_alarm


@contextlib.contextmanager
def interrupted(action, rounds):
    """Run `action` that often, each time with an alarm that goes off somewhere in it, or soon after."""
    armed = False

    def handler(number, frame):
        nonlocal armed
        if armed:  # a busy machine may deliver a late alarm when the action is over
            armed = False
            raise Interrupt

    chance = random.Random(0)
    landed = 0
    with on_alarm(handler):
        for _ in range(rounds):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 60e-6))
                action()
                armed = False
            except Interrupt:
                landed += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert landed > rounds // 10
        yield


@pytest.mark.parametrize("slots", [1, 2])
def test_an_interrupted_writer_can_go_on(both, slots):
    source = {"w": torch.zeros(64)}
    pub, sub = both(source, slots=slots)

    def update():
        with pub.update() as weights:
            weights["w"].add_(1)

    def either():
        if pub._writer.side.writer.poisoned:
            pub.publish(source)
        else:
            update()
            pub.publish()

    for _ in range(slots + 1):
        update()  # makes the TensorDict of each slot: tensordict turns an interrupt in there into its own error
    with interrupted(either, 3000):
        pub.publish(source)
        with sub.read() as section:
            assert (section.weights["w"] == 0).all()
        assert not pub._writer.side.lock.locked()


def test_an_interrupt_leaves_no_mode_of_torch_switched_on():
    net, strategy = nn.Linear(2, 2), WeightStrategy("state_dict")

    def extract():
        with plainly():
            strategy.extract_weights(net)

    with interrupted(extract, 3000):
        assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled()
        assert (net.weight.clone() * 2).requires_grad
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("slots", [1, 2])
def test_an_interrupted_reader_holds_nobody_up(both, slots):
    pub, sub = both({"w": torch.zeros(64)}, slots=slots, timeout=5.0)
    module = sub.bind(nn.ParameterDict({"w": nn.Parameter(torch.ones(64), requires_grad=False)}), guard=False)

    def use():
        pub.publish()
        with sub.read():
            pass
        pub.publish()
        sub.refresh()

    for _ in range(slots + 1):
        use()
        assert len(sub.weights.keys()) == 1  # as above
    with interrupted(use, 3000):
        for value in range(1, 6):
            pub.publish({"w": torch.full((64,), float(value))})
            assert pub.readers()[0].pinned is None
            with sub.read() as section:
                assert (section.weights["w"] == value).all()
                assert (module["w"] == value).all()


def test_a_handler_may_not_use_the_subscriber_in_the_middle_of_its_entry(both, monkeypatch):
    pub, sub = both({"w": torch.zeros(4)}, slots=2)
    move = type(sub._reader)._move
    seen = []

    def handler_lands_here(self):
        seen.append(self.refresh())
        with pytest.raises(shmsync.ProtocolError, match="being entered or left"), self.read():
            pass
        move(self)

    monkeypatch.setattr(type(sub._reader), "_move", handler_lands_here)
    pub.publish()
    with sub.read():
        assert pub.readers()[0].pinned == 2
    assert seen == [False]


def test_a_reader_thread_beside_the_trainer_gets_its_turn(publisher, subscriber):
    pub = publisher({"w": torch.zeros(64)})
    sub = subscriber(pub, timeout=60.0)
    versions = []
    with meanwhile(pub.publish):
        while len(versions) < 100 or len(set(versions)) == 1:  # each of the two threads must get its turn
            versions.append(sub.snapshot().version)
    assert versions == sorted(versions)


def test_close_beside_a_publish_of_another_thread(publisher):
    for _ in range(20):
        pub = publisher({"w": torch.zeros(1 << 16)})
        started = threading.Event()

        def train(pub=pub, started=started):
            while True:
                pub.publish()
                started.set()
                time.sleep(0)  # lets close() come between two publishes

        training = Call(train)
        started.wait()
        while True:
            try:
                pub.close()
                break
            except shmsync.WriterBusy:
                time.sleep(1e-4)
        with pytest.raises(shmsync.ClosedError):
            training.result()


def test_readers_may_be_asked_for_in_another_thread(publisher, subscriber):
    pub = publisher({"w": torch.zeros(4)})
    subscriber(pub)
    with meanwhile(pub.readers):
        for _ in range(300):
            pub._writer.side.peers.alive(pub._writer.side.pin_wait.me)
            pub._writer.side.peers.keep_only(set())
