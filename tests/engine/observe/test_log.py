"""The logger "shmsync" reports events without a call, with the arena's name: dead readers, stalls, sweeps."""

import logging

import pytest

import shmsync
from shmsync.memory import leftovers
from support.jobs.engine import enter
from support.weights import stamped


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="shmsync")

    def said(level, *words):
        return [
            r.getMessage() for r in caplog.records if r.levelname == level and all(w in r.getMessage() for w in words)
        ]

    return said


def test_a_reader_that_died_in_a_section(attached, log):
    with shmsync.Publisher(stamped(1)) as pub:
        reader = attached(pub, worker=3)
        reader.call(enter)
        reader.kill()
        pub.publish(stamped(2))
        assert len(log("INFO", f"arena '{pub.name}'", "reader 3 died")) == 1


def test_a_publish_that_finds_no_slot(attached, log):
    with shmsync.Publisher(stamped(1)) as pub:
        reader = attached(pub, worker=3)
        reader.call(enter)
        with pytest.raises(shmsync.ReaderStalled):
            pub.publish(stamped(2), timeout=0.05)
        assert len(log("WARNING", f"arena '{pub.name}'", "version 2 was not written", "worker 3")) == 1


def test_what_a_dead_publisher_left(open_trainer, log, name):
    open_trainer().kill()
    assert leftovers.sweep(name) == 1  # its last version
    assert log("INFO", f"arena '{name}'", "was removed")
