"""The fuzzer of control segments as a program: python -m support.fuzz.fuzz --inputs 1000000 --seed 7.

It makes segments that are nearly right. Subscribers and inspectors refuse them with a typed error, or read them. Memory
is bounded by what came.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import random
import resource
import secrets
import time

import torch

import shmsync
from shmsync.memory import inspection as observed
from shmsync.memory import segment
from shmsync.memory.process import Peers
from support.faults.forged import FIELDS, identity, packed
from support.processes import segment_path

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30,
)  # fmt: skip
WIDE = ("magic", "segment_bytes", "owner", "pid_namespace", "slot_bytes", "slab_inode", "manifest_offset",
        "manifest_bytes", "fingerprint")  # fmt: skip


class Segments:
    """Segments with other identities, publications, slots, manifests and rows; a seed draws the same ones again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._pub = shmsync.Publisher({"t": torch.arange(8.0), "u.v": torch.ones(3)}, slots=2, max_readers=4)
        path = segment_path(self._pub.name)
        self._bytes, self._fields = path.read_bytes(), identity(path)
        self._name = f"{self._pub.name}.fuzzed"
        self._copy = segment_path(self._name)
        self._fd = os.open(self._copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)  # else a new publisher removes it if no process is its owner
        self._peers = Peers()

    def _number(self) -> int:
        """One that is at the edge of something, or near, or any."""
        drawn = self.random.choice(NUMBERS)
        if self.random.random() < 0.3:
            drawn += self.random.randint(-3, 3)
        return drawn if self.random.random() < 0.8 else self.random.getrandbits(self.random.choice((8, 16, 32, 64)))

    def _input(self) -> bytes:
        data = bytearray(self._bytes)
        if self.random.random() < 0.7:  # the crc is right: nothing but the checks of the values is in the way
            fields = dict(self._fields)
            for name in self.random.sample(FIELDS, self.random.choice((1, 1, 1, 2, 3))):
                if isinstance(fields[name], int):
                    fields[name] = self._number() % 2 ** (64 if name in WIDE else 31 if name == "slab_fd" else 32)
                else:
                    fields[name] = self.random.randbytes(len(fields[name]))
            data[:256] = packed(fields)
        if self.random.random() < 0.5:
            at = self.random.choice((0, 128, 256, 384, 512, 640, 65536)) + 8 * self.random.randrange(32)
            data[at : at + 8] = (self._number() % 2**64).to_bytes(8, "little")
        if self.random.random() < 0.1:
            del data[self.random.choice((0, 1, 135, 255, 256, 500, 4096, 65536, 70000)) :]
        return bytes(data)

    def is_read(self) -> bool:
        """Draw a segment and look at it in every way. Is it read? Else it is refused with a typed error."""
        data = self._input()
        os.ftruncate(self._fd, len(data))
        os.pwrite(self._fd, data[:1024], 0)
        os.pwrite(self._fd, data[65536 : 65536 + 512], 65536) if len(data) > 65536 else None
        try:
            observed.look(self._name, self._peers)
            with contextlib.suppress(shmsync.ShmSyncError):
                observed.manifest_of(self._name)
            segment.attach(self._name, None, 0.0).control.rows()
        except shmsync.ShmSyncError:
            return False
        return True

    def close(self) -> None:
        self._peers.close()
        os.close(self._fd)
        self._copy.unlink(missing_ok=True)
        self._pub.close()


def run(*, seed: int, inputs: int) -> dict[str, object]:
    """Try so many inputs; what came of them. Whatever is no typed error is raised."""
    segments, started, before, read = Segments(seed), time.monotonic(), _peak(), 0
    try:
        for tried in range(inputs):
            try:
                read += segments.is_read()
            except BaseException as error:
                error.add_note(f"seed {seed}, input {tried}") if hasattr(error, "add_note") else None
                raise
    finally:
        segments.close()
    seconds = round(time.monotonic() - started, 1)
    return {"seed": seed, "inputs": inputs, "read": read, "seconds": seconds, "memory": _peak() - before}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    chosen = parser.parse_args()
    logging.getLogger("shmsync").setLevel(logging.ERROR)
    print(run(seed=chosen.seed, inputs=chosen.inputs))


if __name__ == "__main__":
    main()
