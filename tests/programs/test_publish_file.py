"""`shmsync publish NAME FILE`: readers get what the file holds, until a signal ends it."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch

import shmsync
from shmsync import cli
from support.processes import until
from support.programs.programs import Example

safetensors = pytest.importorskip("safetensors.torch", reason="these files need shmsync[safetensors]")


def run_command(state, log, *arguments):
    """The command in a worker, which has torch imported already. What it prints goes into this file."""
    os.dup2(os.open(log, os.O_WRONLY), 1)
    return cli.main(["publish", *map(str, arguments)])


@pytest.fixture
def publish(start, tmp_path, name):
    """publish(file) lets a worker publish it. Returns the worker, and what says what it has printed."""

    def run(file):
        (log := tmp_path / "log").touch()
        command = start()
        command.start(run_command, log, name, file)
        until(lambda: "\n" in log.read_text())
        return command, log.read_text

    return run


def weights(value):
    return {"body.weight": torch.full((3, 4), float(value)), "body.bias": torch.full((3,), float(value))}


def value_in(section):
    return {tensor.unique().item() for tensor in section.weights.values(True, True)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_readers_get_a_file_until_a_signal_ends_it(tmp_path, name, number):
    path = tmp_path / "policy.pt"
    torch.save(weights(1), path)
    command = Example(tmp_path, "-m", "shmsync", "publish", name, str(path))
    try:
        assert command.read_until("version 1").strip() == f"version 1 of {name}: {path}, 2 tensors, 60 B"
        with shmsync.Subscriber(name) as sub:
            versions = sub.versions()
            assert next(versions) == 1
            with sub.read() as section:
                assert value_in(section) == {1}
            command.process.send_signal(number)
            assert command.end().splitlines()[1:] == [f"arena {name} ends"]
            assert list(versions) == []  # in order: readers see that it is closed, not that it died
    finally:
        command.kill()


def test_a_server_follows_to_the_next_file_under_the_name(tmp_path, publish, name):
    path = tmp_path / "policy.safetensors"
    safetensors.save_file(weights(1), path)
    command, _ = publish(path)
    with shmsync.Subscriber(name, follow=True, timeout=60.0) as sub:
        os.kill(command.pid, signal.SIGTERM)
        assert command.result() == 0
        with sub.read() as section:
            assert value_in(section) == {1}
        safetensors.save_file(weights(2), path)
        publish(path)
        until(lambda: sub.refresh())
        with sub.read() as section:
            assert value_in(section) == {2}


def test_shards_are_read_by_their_index(tmp_path, publish, name):
    index = tmp_path / "model.safetensors.index.json"
    shards = {f"model-{k}.safetensors": {key: tensor} for k, (key, tensor) in enumerate(weights(1).items())}
    for shard, state in shards.items():
        safetensors.save_file(state, tmp_path / shard)
    places = {key: shard for shard, state in shards.items() for key in state}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _, said = publish(index)
    assert f"version 1 of {name}: {index}, 2 tensors, 60 B" in said()
    with shmsync.Subscriber(name) as sub, sub.read() as section:
        assert value_in(section) == {1}


def test_tied_tensors_are_there_under_each_of_their_names(tmp_path, publish, name):
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})
    model["second"].weight = model["first"].weight
    safetensors.save_model(model, str(tmp_path / "policy.safetensors"))
    publish(tmp_path / "policy.safetensors")
    with shmsync.Subscriber(name) as sub:
        other = sub.bind(torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)}))
        state = other.state_dict()
        assert torch.equal(state["second.weight"], model["first"].weight)


def half_a_file(folder):
    path = folder / "policy.safetensors"
    safetensors.save_file(weights(1), path)
    path.write_bytes(path.read_bytes()[:-30])
    return path


def a_shard_less(folder):
    path = folder / "model.safetensors.index.json"
    safetensors.save_file(weights(1), folder / "one.safetensors")
    path.write_text(json.dumps({"weight_map": {"body.weight": "one.safetensors", "head.weight": "one.safetensors"}}))
    return path


def no_mapping(folder):
    torch.save([1.0], folder / "list.pt")
    return folder / "list.pt"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (half_a_file, "may not be whole"),
        (a_shard_less, r"one.safetensors lacks head.weight"),
        (no_mapping, r"holds a list; save the state_dict\(\)"),
        (lambda folder: folder / "nowhere.pt", "No such file or directory"),
        (lambda folder: folder / "nowhere.safetensors", "No such file or directory"),
    ],
)
def test_what_it_cannot_begin_with_is_named(tmp_path, capsys, name, file, said):
    assert cli.main(["publish", name, str(file(tmp_path))]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error) and "; nothing was published" in error


def test_a_name_that_is_taken_is_refused(tmp_path, capsys):
    torch.save(weights(1), tmp_path / "policy.pt")
    with shmsync.Publisher(weights(1), name=f"taken-{os.getpid()}") as pub:
        assert cli.main(["publish", pub.name, str(tmp_path / "policy.pt")]) == 1
        assert pub.name in capsys.readouterr().err
