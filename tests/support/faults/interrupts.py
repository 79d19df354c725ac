"""Interrupts of the code under test, as handlers of signals raise them: at one line of it, or at any moment."""

from __future__ import annotations

import contextlib
import linecache
import os
import queue
import random
import signal
import sys
import threading
import time


class Interrupt(Exception):
    pass


@contextlib.contextmanager
def on_alarm(handler, *others):
    """This handles the alarms that the body sets by setitimer(), and these other signals."""
    limit, begun = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()  # that of the test
    before = {number: signal.signal(number, handler) for number in (signal.SIGALRM, *others)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, limit and max(0.1, limit - time.monotonic() + begun))
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def alarms(error=KeyboardInterrupt, *, seed=0, pressed=False):
    """interrupted(call, longest) calls with an alarm in its first so many seconds; True: it raised in the middle.

    interrupted.landed: how many have. An alarm that comes when its call is over raises nothing. `pressed`: every other
    alarm is a SIGINT from another thread, as a real Ctrl-C comes from outside.
    """
    armed, calls = False, 0
    chance = random.Random(seed)
    strikes = queue.SimpleQueue()  # a Semaphore may stay locked after an interrupt

    def press():
        while (pause := strikes.get()) is not None:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGINT)

    def handler(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise error

    def interrupted(call, longest, shortest=1e-5):
        nonlocal armed, calls
        calls += 1
        try:
            armed = True
            if pressed and calls % 2:
                strikes.put(chance.uniform(0, longest))
            else:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(shortest, longest))
            call()
            armed = False
        except error:
            interrupted.landed += 1
            return True
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    interrupted.landed = 0
    presser = threading.Thread(target=press, daemon=True)
    with on_alarm(handler, *[signal.SIGINT] * pressed):
        presser.start()
        try:
            yield interrupted
        finally:
            strikes.put(None)
            presser.join()


@contextlib.contextmanager
def interrupt_at(number, wanted, spared=()):
    """Raise Interrupt once, at the line of this number, from 0, of those that functions of the `wanted` code do.

    Gives a list that is empty until it is raised. A line that begins with one of the `spared` words does not count.
    """
    raised = []

    def look(frame, event, argument):
        nonlocal number
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if spared else ""
        if event == "line" and not raised and not statement.startswith(spared):
            if number == 0:
                raised.append(frame.f_lineno)
                raise Interrupt
            number -= 1
        return look

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: look if wanted(frame.f_code) else None)
    try:
        yield raised
    finally:
        sys.settrace(before)
