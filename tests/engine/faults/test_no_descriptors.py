"""A process without a free descriptor cannot look at others. What it cannot find out is not their death."""

import pytest

from support.descriptors import poor
from support.jobs.engine import attach, begin_update, enter, leave, look, open_arena, publish


@pytest.mark.parametrize("slots", [1, 2])
def test_publisher_leaves_a_living_readers_pin_alone(start, slots):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena, 1, slots=slots), worker=5)
    worker.call(enter)
    for version in range(2, slots + 1):
        trainer.call(publish, version)
    kind, text = trainer.call(poor, 0, publish, slots + 1, timeout=0.2)
    assert kind == "ReaderStalled"
    assert "worker 5" in text
    assert worker.call(leave) is False
    kind, text = trainer.call(poor, 0, publish, slots + 1, wait=[5], timeout=0.2)
    assert kind == "AckTimeout"  # and not that it died
    assert worker.call(look) == (slots + 1,) * 3


def test_reader_stays_out_while_a_living_writer_writes(start):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena))
    trainer.call(begin_update, 2)
    kind, _ = worker.call(poor, 0, look, timeout=0.2)
    assert kind == "WriterBusy"
