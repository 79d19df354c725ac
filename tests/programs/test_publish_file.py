"""`shmsync publish NAME FILE`: readers follow the file, and whatever happens to it, they keep the last good version."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import shmsync
from support.choice import first
from support.processes import until
from support.programs.programs import Example

safetensors = pytest.importorskip("safetensors.torch", reason="these files need shmsync[safetensors]")


class Command(Example):
    """One running command, for an arena of this name."""

    def __init__(self, directory, name, *arguments):
        self.name = name
        super().__init__(directory, "-m", "shmsync", "publish", name, *map(str, arguments))


@pytest.fixture
def publish(tmp_path):
    """publish(*arguments) starts the command for a separate arena."""
    started = []

    def start(*arguments, name=None):
        started.append(Command(tmp_path, name or f"file-{secrets.token_hex(4)}", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.process.stdout.close()


def weights(value):
    return {"body.weight": torch.full((3, 4), float(value)), "body.bias": torch.full((3,), float(value))}


def replace(path, state, mode=0o600):
    """A new file in the place of the old one, as a careful program writes it."""
    made = path.with_name("made" + path.suffix)
    (safetensors.save_file if path.suffix == ".safetensors" else lambda state, made: torch.save(state, made))(
        state, made
    )
    made.chmod(mode)
    if path.is_dir():
        path.rmdir()
    os.replace(made, path)


@pytest.mark.parametrize("suffix", first([".safetensors", ".pt"]))
@pytest.mark.parametrize("signum", first([signal.SIGTERM, signal.SIGINT]))
def test_readers_get_each_file_until_a_signal_ends_it(tmp_path, publish, suffix, signum):
    path = tmp_path / f"policy{suffix}"
    replace(path, weights(1))
    command = publish(path, "--watch", "--interval", "0.05")
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
        command.process.send_signal(signum)
        lines = command.end().splitlines()
        assert list(versions) == []  # in order: readers see that it is closed, not that it died
    assert lines[1:] == [
        f"version 2 of {command.name}: {path}, 2 tensors, 60 B",
        f"version 3 of {command.name}: {path}, 2 tensors, 60 B",
        f"arena {command.name} ends at version 3",
    ]


def checkpoint(path, content):
    torch.save(content, path.with_name("made"))
    os.replace(path.with_name("made"), path)


DAMAGES = {
    "half of it": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "it cannot be read, so it may not be whole"),
    "nothing": (lambda path: path.write_bytes(b""), "it cannot be read, so it may not be whole"),
    "something else": (lambda path: path.write_bytes(b"{}" * 99), "it cannot be read, so it may not be whole"),
    "another shape": (
        lambda path: replace(path, {**weights(5), "body.bias": torch.zeros(4)}),
        r"body\.bias.*\(4,\).*\(3,\)|body\.bias.*\(3,\).*\(4,\)",
    ),
    "a tensor less": (lambda path: replace(path, {"body.bias": torch.zeros(3)}), r"lacks body\.weight, 1 of 2 tensors"),
    "a tensor more": (lambda path: replace(path, {**weights(5), "more": torch.zeros(3)}), "more"),
    "a checkpoint": (
        lambda path: checkpoint(path, {**weights(5), "optimizer": {"state": {0: {"step": torch.zeros(())}}}}),
        "keys must be dotted strings|it cannot be read",
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is no regular file"),
    "no file": (lambda path: path.unlink(), "is gone"),
    "no right to read it": (lambda path: replace(path, weights(5), mode=0), "Permission denied"),
}


@pytest.mark.full  # the first file is refused in the same way
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_that_cannot_be_used_changes_nothing_and_the_next_one_is_published(tmp_path, publish, suffix):
    path = tmp_path / f"policy{suffix}"
    replace(path, weights(1))
    command = publish(path, "--watch", "--interval", "0.05")
    command.read_until("version 1")
    damages = {what: each for what, each in DAMAGES.items() if os.getuid() or what != "no right to read it"}
    with shmsync.Subscriber(command.name) as sub:
        for version, (what, (spoil, said)) in enumerate(damages.items(), 1):
            spoil(path)
            line = command.read_until("stays")
            assert f"version {version} stays" in line and re.search(said, line), (what, line)
            with sub.read() as section:
                assert section.version == version and section.weights["body", "bias"].unique().item() == version
            replace(path, weights(version + 1))
            command.read_until(f"^version {version + 1}")
            sub.wait_version(version + 1, timeout=60)


@pytest.mark.full  # a quarter of a minute
def test_a_file_that_is_being_written_is_not_read(tmp_path, publish):
    path, old, new = (tmp_path / f"{name}.safetensors" for name in ("policy", "old", "new"))
    safetensors.save_file(weights(1), old)
    safetensors.save_file(weights(2), new)
    path.write_bytes(old.read_bytes())
    command = publish(path, "--watch", "--interval", "1")
    command.read_until("version 1")
    half, end = len(old.read_bytes()) // 2, time.monotonic() + 4
    while time.monotonic() < end:  # each content is whole, and none stays for two looks
        for content in (old.read_bytes()[:half] + new.read_bytes()[half:], old.read_bytes()):
            path.write_bytes(content)
            time.sleep(0.01)
    replace(path, weights(3))
    assert command.read_until("version").startswith("version 2")
    with shmsync.Subscriber(command.name) as sub, sub.read() as section:
        assert section.weights["body", "bias"].unique().item() == 3


def test_readers_keep_the_weights_of_a_killed_one_and_follow_the_next(tmp_path, publish):
    path = tmp_path / "policy.safetensors"
    replace(path, weights(1))
    command = publish(path, "--watch")
    with shmsync.Subscriber(command.name, timeout=60, follow=True) as sub:
        command.process.kill()
        command.process.wait()
        with sub.read() as section:
            assert section.weights["body", "bias"].unique().item() == 1
        replace(path, weights(7))
        publish(path, "--watch", name=command.name)
        until(lambda: sub.state_dict()["body.bias"].unique().item() == 7)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(7, 5)
        self.decoder = nn.Linear(5, 7, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(self.encoder(x))


@pytest.mark.full  # half a minute; tied weights are tested by source, and files by the tests above
@pytest.mark.parametrize("how", ["save_model", "shmsync export"])
def test_a_module_with_tied_weights_is_bound(tmp_path, publish, how):
    net, path = Tied(), tmp_path / "net.safetensors"
    if how == "save_model":
        safetensors.save_model(net, path)
    else:
        with shmsync.Publisher(net, name=f"exported-{os.getpid()}") as pub:
            subprocess.run([sys.executable, "-m", "shmsync", "export", pub.name, str(path)], check=True)
    command = publish(path)
    command.read_until("version 1")
    x = torch.arange(7)
    with shmsync.Subscriber(command.name) as sub, torch.no_grad():
        bound = sub.bind(Tied())
        assert torch.equal(bound(x), net(x))
        assert bound.decoder.weight.data_ptr() == bound.encoder.weight.data_ptr()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; nothing was published"),
        (torch.ones(3), "it holds a Tensor; save the state_dict() of the module"),
        pytest.param(nn.Linear(2, 2), "it cannot be read", marks=pytest.mark.full),
    ],
    ids=["no file", "a tensor", "a pickled module"],
)
def test_what_it_cannot_begin_with_is_said(tmp_path, publish, content, said):
    path = tmp_path / "policy.pt"
    if content is not None:
        torch.save(content, path)
    command = publish(path)
    command.end(code=1)
    assert said in command.errors.read_text()


@pytest.mark.parametrize(("arguments", "status"), [(["--slots", "0"], 1), (["--interval", "0"], 2)])
def test_arguments_out_of_range_are_refused(tmp_path, publish, arguments, status):
    path = tmp_path / "policy.pt"
    torch.save(weights(1), path)
    command = publish(path, *arguments)
    command.end(code=status)
    assert arguments[0][2:] in command.errors.read_text()


def test_a_name_that_is_taken_is_refused(tmp_path, publish):
    path = tmp_path / "policy.pt"
    torch.save(weights(1), path)
    with shmsync.Publisher(weights(1), name=f"taken-{os.getpid()}") as pub:
        command = publish(path, name=pub.name)
        command.end(code=1)
    assert pub.name in command.errors.read_text()
