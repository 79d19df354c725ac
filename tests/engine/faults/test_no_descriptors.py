"""A process without a free descriptor cannot look at others. What it cannot find out is not their death."""

import contextlib
import os
import resource

import pytest

from support.jobs.engine import attach, begin_update, enter, leave, look, open_arena, publish


def poor(state, function, *args, **kwargs):
    """function(state, ...) without a free descriptor; its result, or the error's type and text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    try:
        return function(state, *args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("slots", [1, 2])
def test_publisher_leaves_a_living_readers_pin_alone(start, slots):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena, 1, slots=slots), worker=5)
    worker.call(enter)
    for version in range(2, slots + 1):
        trainer.call(publish, version)
    kind, text = trainer.call(poor, publish, slots + 1, timeout=0.2)
    assert kind == "ReaderStalled"
    assert "worker 5" in text
    assert worker.call(leave) is False
    kind, text = trainer.call(poor, publish, slots + 1, wait=[5], timeout=0.2)
    assert kind == "AckTimeout"  # and not that it died
    assert worker.call(look) == (slots + 1,) * 3


def test_reader_stays_out_while_a_living_writer_writes(start):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena))
    trainer.call(begin_update, 2)
    kind, _ = worker.call(poor, look, timeout=0.2)
    assert kind == "WriterBusy"
