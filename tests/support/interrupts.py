"""Alarms, and Ctrl-C, that raise at random moments of calls."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import threading
import time


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
    numbers = (signal.SIGALRM, signal.SIGINT) if pressed else (signal.SIGALRM,)
    before = {number: signal.signal(number, handler) for number in numbers}
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    try:
        yield interrupted
    finally:
        strikes.put(None)
        presser.join()
        for number, earlier in before.items():
            signal.signal(number, earlier)
