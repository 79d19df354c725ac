"""Interrupts of the code under test, as handlers of signals raise them: at one line of it, or at any moment."""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys


class Interrupt(Exception):
    pass


@contextlib.contextmanager
def on_alarm(handler):
    """This handles the alarms that the body sets by setitimer()."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
