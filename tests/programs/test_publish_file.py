"""`shmsync publish NAME FILE`: readers follow the file, and whatever happens to it, they keep the last good version."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal

import pytest
import torch

import shmsync
from shmsync import cli
from support.processes import segment_path, until
from support.programs.programs import Example

safetensors = pytest.importorskip("safetensors.torch", reason="these files need shmsync[safetensors]")


class Command(Example):
    """One running command, for an arena of this name."""

    def __init__(self, directory, name, *arguments):
        self.name = name
        super().__init__(directory, "-m", "shmsync", "publish", name, *map(str, arguments))


@pytest.fixture
def publish(tmp_path):
    """publish(*arguments) starts the command as a program, for a separate arena."""
    started = []

    def start(*arguments, name=None):
        started.append(Command(tmp_path, name or f"file-{secrets.token_hex(4)}", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.process.stdout.close()
        segment_path(each.name).unlink(missing_ok=True)  # no other publisher sweeps a name that was chosen


def run_command(state, log, *arguments):
    """The command in a worker, which has torch imported already. What it prints goes into this file."""
    os.dup2(os.open(log, os.O_WRONLY), 1)
    cli.main(["publish", *map(str, arguments)])


@pytest.fixture
def watch(start, tmp_path, name):
    """watch(file) lets a worker publish it; says(pattern) -> the next line with this pattern that it prints."""

    def run(file):
        (log := tmp_path / "log").touch()
        start().start(run_command, log, name, file, "--watch")
        lines, line = log.open(), [""]

        def found(pattern):
            line[0] = lines.readline()
            return re.search(pattern, line[0])

        def says(pattern):
            until(lambda: found(pattern))
            return line[0]

        return says

    return run


def weights(value):
    return {"body.weight": torch.full((3, 4), float(value)), "body.bias": torch.full((3,), float(value))}


def replace(path, state):
    """A new file in the place of the old one, as a careful program writes it."""
    made = path.with_name("made" + path.suffix)
    (safetensors.save_file if path.suffix == ".safetensors" else lambda state, made: torch.save(state, made))(
        state, made
    )
    os.replace(made, path)


@pytest.mark.slow
def test_readers_get_each_file_until_a_signal_ends_it(tmp_path, publish):
    path = tmp_path / "policy.pt"
    replace(path, weights(1))
    command = publish(path, "--watch")
    assert command.read_until("version 1").strip() == f"version 1 of {command.name}: {path}, 2 tensors, 60 B"
    with shmsync.Subscriber(command.name) as sub:
        for version in range(1, 4):
            if version > 1:
                replace(path, weights(version))
            sub.wait_version(version, timeout=60)
            with sub.read() as section:
                assert section.version == version
                assert torch.equal(section.weights["body", "weight"], weights(version)["body.weight"])
        versions = sub.versions()
        assert next(versions) == 3
        command.process.send_signal(signal.SIGINT)
        lines = command.end().splitlines()
        assert list(versions) == []  # in order: readers see that it is closed, not that it died
    assert lines[1:] == [
        f"version 2 of {command.name}: {path}, 2 tensors, 60 B",
        f"version 3 of {command.name}: {path}, 2 tensors, 60 B",
        f"arena {command.name} ends at version 3",
    ]


DAMAGES = {
    "half of it": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "it cannot be read, so it may not be whole"),
    "another shape": (
        lambda path: replace(path, {**weights(5), "body.bias": torch.zeros(4)}),
        r"body\.bias.*\(4,\).*\(3,\)|body\.bias.*\(3,\).*\(4,\)",
    ),
    "a tensor less": (lambda path: replace(path, {"body.bias": torch.zeros(3)}), r"lacks body\.weight, 1 of 2 tensors"),
    "no file": (lambda path: path.unlink(), "is gone"),
}


def test_a_file_that_cannot_be_used_changes_nothing_and_the_next_one_is_published(tmp_path, watch, name):
    path = tmp_path / "policy.safetensors"
    replace(path, weights(1))
    says = watch(path)
    says("version 1")
    with shmsync.Subscriber(name) as sub:
        for version, (what, (spoil, said)) in enumerate(DAMAGES.items(), 1):
            spoil(path)
            line = says("stays")
            assert f"version {version} stays" in line and re.search(said, line), (what, line)
            with sub.read() as section:
                assert section.version == version and section.weights["body", "bias"].unique().item() == version
            replace(path, weights(version + 1))
            says(f"^version {version + 1}")
            sub.wait_version(version + 1, timeout=60)


def test_shards_are_read_by_their_index(tmp_path, watch, name):
    index = tmp_path / "model.safetensors.index.json"

    def write(value):
        shards = {f"model-{k}.safetensors": {name: t} for k, (name, t) in enumerate(weights(value).items())}
        for shard, state in shards.items():
            replace(tmp_path / shard, state)
        places = {name: shard for shard, state in shards.items() for name in state}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))

    write(1)
    says = watch(index)
    says("version 1 .*2 tensors, 60 B")
    (tmp_path / "model-0.safetensors").rename(tmp_path / "away")
    says("is gone; version 1 stays")
    write(2)
    says("^version 2")
    with shmsync.Subscriber(name) as sub, sub.read() as section:
        assert {tensor.unique().item() for tensor in section.weights.values(True, True)} == {2}


def test_what_it_cannot_begin_with_is_named(tmp_path, capsys):
    path = tmp_path / "policy.pt"
    with shmsync.Publisher(weights(1), name=f"taken-{os.getpid()}") as pub:
        assert cli.main(["publish", pub.name, str(path)]) == 1
        assert "No such file or directory; nothing was published" in capsys.readouterr().err
        torch.save(weights(1), path)
        assert cli.main(["publish", pub.name, str(path)]) == 1
        assert pub.name in capsys.readouterr().err
