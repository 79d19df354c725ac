"""A trace begins and ends at any moment: publishes go on, readers join in, and nothing is left of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time

import pytest
import torch

import shmsync
from support.calls import Call
from support.devices.on_simulated import end_trace_during_publish
from support.faults.interrupts import Interrupt, interrupt_at
from support.jobs import engine
from support.processes import descriptors
from support.trace_file import descriptors_of, of


def test_a_trace_begins_and_ends_beside_a_thread_that_publishes(tmp_path):
    """Neither the publishes nor the traces are refused, and a trace has whole publishes only."""
    with shmsync.Publisher({"t": torch.zeros(100_000)}) as pub:
        over = threading.Event()

        def publish():
            while not over.is_set():
                pub.publish()
                with pub.update():
                    pass

        publishing = Call(publish)
        try:
            for number in range(300):
                with pub.trace(tmp_path / f"{number % 3}.json"):
                    time.sleep(0.0005)
        finally:
            over.set()
        publishing.result()
        assert all(of(tmp_path / f"{number}.json", "publish") for number in range(3))
        assert not descriptors_of(tmp_path / "0.json")


def test_a_trace_that_ends_during_a_publish_needs_no_interpreter_on_the_devices_thread(start, file):
    """The device's thread drops the trace; with a reference of Python's it waited for the GIL, with the lock held."""
    assert start().call(end_trace_during_publish, file) == (True, True)
    assert of(file, "publish") and not descriptors_of(file)


def test_a_reader_that_cannot_join_in_says_so_and_reads_on(caplog, file):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pub.trace(file):
            file.chmod(0o600)
            file.write_bytes(b"another file " * 10)  # by a program that chose the same name
            with caplog.at_level(logging.WARNING, "shmsync"), sub.read() as section:
                assert section.version == 1
        assert "missing in the trace" in caplog.text and "no trace of shmsync" in caplog.text


def test_a_subscriber_that_follows_is_traced_by_the_next_trainer_too(file):
    pub = shmsync.Publisher({"t": torch.zeros(8)}, name="traced-twice")
    with shmsync.Subscriber("traced-twice", follow=True, worker=1) as sub:
        with pub.trace(file), sub.read():
            pass
        pub.close()
        with shmsync.Publisher({"t": torch.ones(8)}, name="traced-twice") as pub, pub.trace(file):
            sub.refresh()
            before = len(of(file, "section"))
            with sub.read() as section:
                assert section.weights["t"][0] == 1
            assert len(of(file, "section")) == before + 1


def test_a_traced_publisher_leaves_no_descriptor(tmp_path):
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub, shmsync.Subscriber(pub.handle) as sub:
        before = len(descriptors())
        for _ in range(5):
            with pub.trace(tmp_path / "trace.json"), sub.read():
                pass
            with sub.read():
                pass
        assert len(descriptors()) == before
    with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
        pub.trace(tmp_path / "trace.json")
    assert len(descriptors()) < before


def test_a_reader_that_saw_nothing_of_the_end_of_a_trace_joins_the_next(start, tmp_path):
    with shmsync.Publisher(engine.stamped(1)) as pub:
        reader = start()
        reader.call(engine.attach, pub.handle, worker=0)
        for number in range(3):
            file = tmp_path / f"{number}.json"
            with pub.trace(file):
                reader.call(engine.look)
                assert len(of(file, "section", reader.pid)) == 1


# Handlers of signals are called behind calls. So none is called where a `with` is left, before __exit__() is, nor at a
# bare `try`, nor before the first call of a `finally`, nor at the end of a function.
NO_HANDLER = ("with ", "try:", "os.close(", "return ")


@pytest.mark.parametrize("step", ["trace", "stop"])
def test_an_interrupt_at_any_line_leaves_a_publisher_that_can_be_traced(file, step):
    """`step`: in which it lands."""
    names = {"trace": {"trace", "__init__", "_opened", "begin", "write_to"}, "stop": {"stop", "ended", "write_to"}}

    def wanted(code):
        return os.path.basename(code.co_filename) in ("tracing.py", "writing.py") and code.co_name in names[step]

    for line in itertools.count():
        with shmsync.Publisher({"t": torch.zeros(8)}) as pub:
            tracing = None if step == "trace" else pub.trace(file)
            with interrupt_at(line, wanted, NO_HANDLER) as raised, contextlib.suppress(Interrupt):
                if tracing is None:
                    pub.trace(file)
                else:
                    tracing.stop()
            if tracing is not None:
                tracing.stop()
            elif raised:
                with pub.trace(file):
                    pub.publish()
            pub.publish()
        assert descriptors_of(file) == []
        if not raised:
            break
    assert line > 5
