import contextlib
import gc
import queue
import signal
import time
import weakref
from collections import Counter

import pytest

from shmsync.schemes.link.timed_queue import TimedQueue
from support.calls import Call
from support.faults.interrupts import on_alarm

SHORT = [0.0, -1.0, 1e-9, 1e-6, 3e-6, 2e-5]


def hung(function, *args):
    """Has this call not come back after ten seconds? It goes on in a daemon thread then."""
    call = Call(function, *args)
    call.join(10)
    return call.is_alive()


def put_take_and_wait(line, times, timeout):
    """The lock of the queue is left over from each put() when get() begins to wait."""
    for _ in range(times):
        line.put(1)
        line.get()
        with contextlib.suppress(queue.Empty):
            line.get(timeout=timeout)


@pytest.mark.parametrize("timeout", SHORT)
def test_a_wait_ends_with_its_time_whatever_was_put_before(timeout):
    assert not hung(put_take_and_wait, TimedQueue(), 30_000, timeout)


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("timeout", [None, 5e-5, 0.01])
def test_every_item_comes_once_and_in_order(consumers, timeout):
    line, got, each = TimedQueue(), [[] for _ in range(consumers)], 3000

    def consume(mine):
        while True:
            try:
                item = line.get(timeout)
            except queue.Empty:
                continue
            if item is None:
                return
            mine.append(item)

    def produce(name):
        for number in range(each):
            line.put((name, number))
            if number % 100 == 0:
                time.sleep(1e-4)

    consuming = [Call(consume, mine) for mine in got]
    for producing in [Call(produce, name) for name in "ab"]:
        producing.result()
    for _ in consuming:
        line.put(None)
    for call in consuming:
        call.result()
    assert Counter(item for mine in got for item in mine) == Counter((n, i) for n in "ab" for i in range(each))
    for mine in got:
        for name in "ab":
            numbers = [number for of, number in mine if of == name]
            assert numbers == sorted(numbers)
    assert line.empty()


def test_a_wait_is_woken_by_a_finaliser_and_by_a_handler_of_a_signal():
    line = TimedQueue()

    class Thing:
        pass

    thing = Thing()
    thing.itself = thing
    weakref.finalize(thing, line.put, "finaliser")
    del thing
    gc.collect()
    assert line.get(60) == "finaliser"
    with on_alarm(lambda *_: line.put("handler")):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert line.get(60) == "handler"


def test_an_interrupted_wait_loses_no_item():
    line = TimedQueue()
    with on_alarm(signal.default_int_handler):
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                line.get(60)
            line.put("kept")
            assert line.get(0.0) == "kept"
