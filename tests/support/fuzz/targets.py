"""What the fuzzers try: each target makes inputs that are nearly right, and looks what comes of them.

An input is refused with a typed error, or read; nothing else. Memory is bounded by what came.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

import torch

import shmsync
from shmsync.memory import inspection as observed
from shmsync.memory import segment
from shmsync.memory.process import Peers
from support.faults.forged import FIELDS, identity, packed
from support.fuzz.mutating import Mutator
from support.processes import segment_path


class Target:
    """One thing that reads what others wrote."""

    def __init__(self, seed: int) -> None:
        self.draw = Mutator(seed)
        self.accepted = self.refused = 0

    def once(self) -> None:
        """Draw an input, and try it."""
        try:
            self.attempt()
        except shmsync.ShmSyncError:
            self.refused += 1
        else:
            self.accepted += 1

    def attempt(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


class SegmentHeader(Target):
    """Identity, publication, slots, manifest and rows of a control segment, for subscribers and inspectors."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._pub = shmsync.Publisher({"t": torch.arange(8.0), "u.v": torch.ones(3)}, slots=2, max_readers=4)
        self._path = segment_path(self._pub.name)
        self._bytes = self._path.read_bytes()
        self._fields = identity(self._path)
        self._name = f"{self._pub.name}.fuzzed"
        self._copy = segment_path(self._name)
        self._fd = os.open(self._copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)  # else a new publisher removes it if no process is its owner
        self._peers = Peers()

    def _input(self) -> bytes:
        random = self.draw.random
        data = bytearray(self._bytes)
        if random.random() < 0.7:  # the crc is right: nothing but the checks of the values is in the way
            fields = dict(self._fields)
            for name in random.sample(FIELDS, random.choice((1, 1, 1, 2, 3))):
                if isinstance(fields[name], int):
                    wide = 64 if name in WIDE else 31 if name == "slab_fd" else 32
                    fields[name] = self.draw.number() % 2**wide
                else:
                    fields[name] = random.randbytes(len(fields[name]))
            data[:256] = packed(fields)
        if random.random() < 0.5:
            at = random.choice((0, 128, 256, 384, 512, 640, 65536)) + 8 * random.randrange(32)
            data[at : at + 8] = (self.draw.number() % 2**64).to_bytes(8, "little")
        if random.random() < 0.1:
            del data[random.choice((0, 1, 135, 255, 256, 500, 4096, 65536, 70000)) :]
        return bytes(data)

    def attempt(self) -> None:
        data = self._input()
        os.ftruncate(self._fd, len(data))
        os.pwrite(self._fd, data[:1024], 0)
        os.pwrite(self._fd, data[65536 : 65536 + 512], 65536) if len(data) > 65536 else None
        observed.look(self._name, self._peers)
        with contextlib.suppress(shmsync.ShmSyncError):
            observed.manifest_of(self._name)
        segment.attach(self._name, None, 0.0).control.rows()

    def close(self) -> None:
        self._peers.close()
        os.close(self._fd)
        self._copy.unlink(missing_ok=True)
        self._pub.close()


WIDE = ("magic", "segment_bytes", "owner", "pid_namespace", "slot_bytes", "slab_inode", "manifest_offset",
        "manifest_bytes", "fingerprint")  # fmt: skip


TARGETS = {"segment": SegmentHeader}
