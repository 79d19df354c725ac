"""Pieces of the schemes for several machines, in one process: relays, receivers, what travels back."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import shmsync
from shmsync.engine.outcome import Failure
from shmsync.schemes.remote import packed_weights as packed_weights_module
from shmsync.schemes.remote.packed_weights import Packer, allow_views, unpack
from shmsync.schemes.remote.relay import RelayOptions, close_here, publish_here

OPTIONS = RelayOptions(1, 5.0)


@pytest.fixture
def packed_weights():
    """packed(sender, version) -> what a relay in another process gets, with the sender's session in its stamp."""

    packers = {}

    def make(sender, version):
        packer = packers.setdefault(sender, Packer())
        weights = packer.pack(nn.Linear(2, 2).state_dict(), "policy", version)
        return weights.__reduce__()[0](*weights.__reduce__()[1])

    yield make
    for packer in packers.values():
        close_here(packer.session, ended=True)


def test_a_late_message_of_a_sender_that_has_ended_harms_no_other(packed_weights):
    close_here(publish_here(OPTIONS, packed_weights("first", 1)).stamp.session, ended=True)
    handle = publish_here(OPTIONS, packed_weights("second", 1)).handle
    with pytest.raises(shmsync.ClosedError):
        publish_here(OPTIONS, packed_weights("first", 2))
    with shmsync.Subscriber(handle) as subscriber:
        assert subscriber.version == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(0)])
def test_the_end_of_a_worker_is_an_error_in_its_sender_and_not_its_end(end):
    try:
        raise end
    except BaseException as error:
        failure = Failure.of(error, None)
    assert type(failure.exception()) is RuntimeError
    assert type(end).__name__ in str(failure.exception())
    assert "test_remote" in failure.trace


def test_an_exit_waits_for_a_request_that_is_under_way():
    """Its thread would come back from torch's own code into an interpreter that is gone, which aborts the process."""
    program = """
import time
from shmsync.schemes.link.serial_executor import SerialExecutor
executor = SerialExecutor()
executor.give(lambda: (time.sleep(0.5), print("done", flush=True)))
time.sleep(0.1)
executor.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("reads", [None, "another", "policy", "all"])
def test_weights_that_others_see_too_are_a_copy_unless_they_are_only_read(reads, monkeypatch):
    """An array as Ray has it, whose memory belongs to all actors of a node."""
    # Receivers of earlier tests may still be alive in this process.
    monkeypatch.setattr(packed_weights_module, "_readers", weakref.WeakKeyDictionary())
    packed_weights = Packer().pack({"w": torch.ones(8)}, "policy", 1)
    shared = packed_weights.buffer.numpy()

    class Reader:
        """Copies weights, as a receiver does."""

    reader = Reader()
    if reads is not None:
        allow_views(reader, None if reads == "all" else reads)
    arrived = unpack(packed_weights.label, shared)["w"]
    assert (arrived.data_ptr() == shared.ctypes.data) == (reads in ("policy", "all"))
    if reads in (None, "another"):
        arrived.fill_(2)
        assert unpack(packed_weights.label, shared)["w"].tolist() == [1.0] * 8
