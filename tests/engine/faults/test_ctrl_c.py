"""Ctrl-C, by real signals: a wait ends, what is half written is undone or poisons, and the next call works."""

import os
import signal
import time
from math import inf as for_ever

import pytest

import shmsync
from support.jobs.engine import attach, enter, leave, look, open_arena, publish, read, wait_version
from support.processes import state, until
from support.weights import stamped


def may_be_interrupted(state):
    """Whatever the shell that began these tests has set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def update_slowly(state, version):
    with state.pub.update() as weights:
        weights["large"].fill_(version)
        time.sleep(1000)


def publish_until_interrupted(state):
    """Publish without pause; the number of versions that came back."""
    try:
        while True:
            publish(state, state.pub.version + 1)
    except KeyboardInterrupt:
        return state.pub.version


@pytest.fixture
def interruptible(start):
    def make(job, *args, **kwargs):
        worker = start()
        worker.call(may_be_interrupted)
        worker.handle = worker.call(job, *args, **kwargs)
        return worker

    return make


def interrupt(worker, call, *args, **kwargs):
    """SIGINT in the middle of this call, which would never end."""
    worker.begin(call, *args, **kwargs)
    until(lambda: state(worker.pid) == "S")
    os.kill(worker.pid, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        worker.result()


@pytest.mark.parametrize("slots", [1, 2])
def test_in_a_publish_that_waits_for_a_stopped_reader(start, interruptible, slots):
    trainer, reader = interruptible(open_arena, slots=slots), start()
    reader.call(attach, trainer.handle, worker=0)
    reader.stop()
    interrupt(trainer, publish, 2, wait="all", timeout=for_ever)
    reader.resume()
    assert trainer.call(publish, 3) == 3
    assert reader.call(look) == (3, 3, 3)


def test_in_a_publish_that_waits_for_the_only_slot(start, interruptible):
    trainer, reader = interruptible(open_arena, slots=1), start()
    reader.call(attach, trainer.handle, worker=0)
    reader.call(enter)
    interrupt(trainer, publish, 2, timeout=for_ever)
    with shmsync.Subscriber(trainer.handle) as other:
        assert read(other) == (1, 1, 1)
    reader.call(leave)
    assert trainer.call(publish, 2) == 2
    assert reader.call(look) == (2, 2, 2)


def test_in_wait_version(interruptible):
    with shmsync.Publisher(stamped(1), slots=2) as pub:
        reader = interruptible(attach, pub.handle, worker=0)
        interrupt(reader, wait_version, 2, timeout=for_ever)
        pub.publish(stamped(2))
        assert reader.call(wait_version, 2) == 2
        assert reader.call(look) == (2, 2, 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_in_the_body_of_an_update(interruptible, slots):
    trainer = interruptible(open_arena, slots=slots)
    with shmsync.Subscriber(trainer.handle, timeout=0.1) as sub:
        interrupt(trainer, update_slowly, 666)
        if slots == 1:
            with pytest.raises(shmsync.Poisoned):
                read(sub)
        else:
            assert read(sub) == (1, 1, 1)
        assert trainer.call(publish, 2) == 2
        assert read(sub) == (2, 2, 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_anywhere_in_a_publish(interruptible, slots):
    """What was half written is undone by the next call, or is poisoned until it."""
    trainer = interruptible(open_arena, slots=slots)
    with shmsync.Subscriber(trainer.handle, timeout=0.1) as sub:
        for _ in range(10):
            trainer.begin(publish_until_interrupted)
            time.sleep(0.02)
            os.kill(trainer.pid, signal.SIGINT)
            version = trainer.result()
            assert trainer.call(publish, version + 1) == version + 1
            assert read(sub) == (version + 1,) * 3
