"""A process without a free descriptor cannot look at others. What it cannot find out is not their death."""

import re

import pytest

import shmsync
from support.descriptors import attach_and_detach, open_and_close, open_descriptors, poor, run_command, states
from support.jobs.engine import (
    attach,
    begin_update,
    close_publisher,
    enter,
    leave,
    look,
    open_arena,
    publish,
    read,
    wait_version,
)
from support.processes import segment_path

FREE = range(12)  # from none to more than any call needs: each call gets further than the one before
COLD = (0, 1, 3, 5, 8)  # with so many free a process makes its first call of the kind; with the others it repeats one
OWN_CALLS = pytest.mark.no_cuda(reason="CUDA's own calls to the system fail too, and the error is CUDA's")


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
    assert trainer.call(publish, slots + 1) == slots + 1
    assert worker.call(look) == (slots + 1,) * 3


@pytest.mark.parametrize("wait", ["all", [5]], ids=str)
def test_publisher_does_not_report_a_late_worker_as_dead(start, wait):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena), worker=5)
    kind, text = trainer.call(poor, 0, publish, 2, wait=wait, timeout=0.2)
    assert kind == "AckTimeout"
    assert "worker 5" in text
    assert worker.call(look) == (2, 2, 2)


def test_publisher_shows_a_reader_that_it_cannot_look_at_as_alive(start):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena), worker=5)
    assert trainer.call(poor, 0, states) == ["live"]


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_reader_stays_out_while_a_living_writer_writes(start, consistency):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena), consistency=consistency)
    trainer.call(begin_update, 2)
    kind, _ = worker.call(poor, 0, look, timeout=0.2)
    assert kind == "WriterBusy"


def test_reader_does_not_report_a_living_writer_as_dead(start):
    trainer, worker = start(2)
    worker.call(attach, trainer.call(open_arena))
    kind, _ = worker.call(poor, 0, wait_version, 2, timeout=0.2)
    assert kind == "PublishTimeout"
    trainer.call(publish, 2)
    assert worker.call(look) == (2, 2, 2)


@OWN_CALLS
def test_the_name_of_a_living_arena_is_kept(start, name):
    (trainer,) = start(1)
    handle = trainer.call(open_arena, 3, name=name)
    for free in FREE:
        if free in COLD:
            (rival,) = start(1)
            before = rival.call(open_descriptors)
        outcome = rival.call(poor, free, open_and_close, name=name)
        assert outcome[0] in ("NoSpace", "ArenaExists"), (free, outcome)
        assert rival.call(open_descriptors) == before, free
        for command in ("gc", "list"):
            outcome = rival.call(poor, free, run_command, command)
            assert isinstance(outcome[0], int), (free, outcome)
            assert f"removed {name}" not in outcome[1], (free, outcome)
            assert not re.search(rf"^{name} +dead", outcome[1], re.M), (free, outcome)
            assert outcome[0] == 1 or name in outcome[1], (free, outcome)
        assert segment_path(name).exists(), free
        with shmsync.Subscriber(handle) as sub:
            assert read(sub) == (3, 3, 3)


@OWN_CALLS
def test_the_row_of_a_living_reader_is_kept(start):
    trainer, worker = start(2)
    handle = trainer.call(open_arena, 1, slots=2, max_readers=1)
    worker.call(attach, handle, worker=5)
    worker.call(enter)
    for free in FREE:
        if free in COLD:
            (joiner,) = start(1)
            before = joiner.call(open_descriptors)
        outcome = joiner.call(poor, free, attach_and_detach, handle)
        assert outcome[0] in ("NoSpace", "ReaderTableFull"), (free, outcome)
        assert joiner.call(open_descriptors) == before, free
    trainer.call(publish, 2)
    for free in FREE:
        assert trainer.call(poor, free, publish, 3, timeout=0.1)[0] == "ReaderStalled", free
    assert worker.call(leave) is False


@OWN_CALLS
def test_a_call_that_lacks_descriptors_changes_nothing_and_works_when_there_are_some(start, name):
    for free in FREE:
        if free in COLD:
            trainer, worker = start(2)
        before = trainer.call(open_descriptors)
        outcome = trainer.call(poor, free, open_and_close, name=name)
        assert outcome == "closed" or outcome[0] == "NoSpace", (free, outcome)
        assert "descriptor" in str(outcome) or "files" in str(outcome) or outcome == "closed", (free, outcome)
        assert not segment_path(name).exists(), free
        assert trainer.call(open_descriptors) == before, free
        handle = trainer.call(open_arena, name=name)
        before = worker.call(open_descriptors)
        outcome = worker.call(poor, free, attach_and_detach, handle)
        assert outcome == (1, 1, 1) or outcome[0] == "NoSpace", (free, outcome)
        assert worker.call(open_descriptors) == before, free
        assert worker.call(attach_and_detach, handle) == (1, 1, 1)
        trainer.call(close_publisher)
