"""Calls in a thread or in a fork of this process, and what became of them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback

from support.processes import PATIENCE


class Call(threading.Thread):
    """A call in a thread of this process: `Call(pub.publish, ...)`, then `.result()`."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self._call = (function, args, kwargs)
        self._value = self._error = None
        self.start()

    def run(self):
        function, args, kwargs = self._call
        try:
            self._value = function(*args, **kwargs)
        except BaseException as error:
            self._error = error

    def result(self):
        self.join(PATIENCE)
        assert not self.is_alive(), f"{self._call[0]} does not return"
        if self._error is not None:
            raise self._error
        return self._value


@contextlib.contextmanager
def naming(error, missing, match=None):
    """The calls inside raise this error, which names these workers, as a list or a set, and no others."""
    import pytest  # which the processes that tests start do not need

    with pytest.raises(error, match=match) as caught:
        yield caught
    assert type(missing)(caught.value.missing) == missing


def in_forked_child(function):
    """(exit status, what function() returned) in a fork of this process, which ends without any clean-up.

    Whatever it raises must not reach pytest, which would go on in the child as a second writer to its pipes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # dying is what some children are for
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of the test, which a child has not
            signal.alarm(300)
            os.close(ours)
            os.write(theirs, pickle.dumps(function()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), pickle.loads(text) if text else None


def outcome(function, *args, **kwargs):
    """The name of what it raises, or "returned"."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error).__name__
    return "returned"


def overrun(function, timeout):
    """(what calls with this deadline raised, the smallest overrun in seconds): a busy machine delays some of them."""
    said, smallest = set(), float("inf")
    for _ in range(10):
        start = time.monotonic()
        said.add(outcome(function))
        smallest = min(smallest, time.monotonic() - start - timeout)
        if smallest < 0.1:
            break
    return said, smallest
