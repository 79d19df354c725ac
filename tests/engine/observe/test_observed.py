"""What an arena shows to a terminal beside it, whatever became of its processes: `shmsync list`, `inspect`, `gc`."""

import contextlib
import fcntl
import json
import re

import pytest

import shmsync
from shmsync import _native, cli
from support.faults.forged import forge, write
from support.jobs.engine import (
    attach,
    enter,
    leave,
    open_arena,
    publish,
    refresh,
)
from support.processes import segment_path
from support.weights import stamped


@pytest.fixture
def said(capsys):
    """said("list", "--json") -> what the command prints."""

    def run(*arguments, status=0):
        assert cli.main(arguments) == status
        printed = capsys.readouterr()
        return printed.out if status == 0 else printed.err

    return run


@pytest.fixture
def told(said):
    """told(name) -> what `list --json` says of an arena."""

    def run(name):
        arenas = json.loads(said("list", "--json"))["arenas"]
        return next((arena for arena in arenas if arena["name"] == name), None)

    return run


@contextlib.contextmanager
def left_dead(trainer, name):
    """Kill the publisher, and keep its segment: sweepers leave one alone that another process has locked."""
    with open(segment_path(name)) as segment:
        fcntl.flock(segment, fcntl.LOCK_SH)
        trainer.kill()
        yield


def test_the_owner_is_live_stopped_or_dead(open_trainer, name, told, said):
    trainer = open_trainer(3, slots=2)
    shown = told(name)
    assert (shown["owner"], shown["pid"], shown["version"], len(shown["slots"])) == ("live", trainer.pid, 3, 2)
    assert shown["command"]
    trainer.stop()
    shown = told(name)
    assert (shown["owner"], shown["version"]) == ("stopped", 3)
    assert "is stopped" in said("list")
    with left_dead(trainer, name):
        shown = told(name)
        assert (shown["owner"], shown["version"], shown["pid"]) == ("dead", 3, trainer.pid)
        assert "`shmsync gc` removes" in shown["why"]
        assert "slots" in said("inspect", name)


def test_readers_are_shown_as_they_are(start, name, told, said):
    trainer, pinned, stopped, killed = start(4)
    handle = trainer.call(open_arena, 2, name=name, slots=3)
    for index, worker in enumerate((pinned, stopped, killed)):
        worker.call(attach, handle, worker=index)
        worker.call(refresh)
    pinned.call(enter)
    stopped.stop()
    killed.kill()
    trainer.call(publish, 3)
    rows = {reader["worker"]: reader for reader in told(name)["readers"]}
    assert {index: row["state"] for index, row in rows.items()} == {0: "live", 1: "stopped", 2: "dead"}
    assert [rows[i]["pid"] for i in range(3)] == [pinned.pid, stopped.pid, killed.pid]
    assert (rows[0]["pinned"], rows[1]["pinned"], rows[0]["lag"], rows[0]["acked"]) == (2, None, 1, 2)
    assert rows[0]["pin_age"] > 0 == rows[1]["pin_age"]
    text = said("inspect", name)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["0", str(pinned.pid)])
    assert line.split()[2:6] == ["live", "2", "1", "2"]
    pinned.call(leave)
    assert told(name)["readers"][0]["reads"] >= 1


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"whatever", "is no segment of shmsync"),
        (8, (_native.ABI + 1).to_bytes(4, "little"), f"layout is number {_native.ABI + 1}, but this one reads number"),
        (72, (0).to_bytes(4, "little"), "crc"),
    ],
    ids=["no arena", "another version", "damaged"],
)
def test_what_cannot_be_read_says_why(open_trainer, name, told, said, offset, data, words):
    open_trainer()
    write(name, offset, data)
    assert words in told(name)["why"]
    assert told(name)["version"] is None
    assert name in said("inspect", name)


def test_an_unknown_name_is_an_error_that_lists_the_others(said, name):
    with shmsync.Publisher(stamped(1)) as pub:
        assert re.search(f"no arena '{name}'.*there are: .*{pub.name}", said("inspect", name, status=1))


def test_a_publisher_of_another_pid_namespace(start, name, told):
    """Its lock tells that it lives. Its pid, and its readers, mean nothing here."""
    trainer, reader = start(2)
    reader.call(attach, trainer.call(open_arena, name=name), worker=0)
    forge(name, pid_namespace=0)
    shown = told(name)
    assert (shown["owner"], shown["pid"], shown["version"]) == ("live", None, 1)
    assert shown["readers"][0]["state"] == "unknown"
    assert "another container" in shown["why"]
