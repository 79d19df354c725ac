"""What a worker writes for its storm: a row of numbers in a file that both map. It stays when the worker is killed."""

from __future__ import annotations

import mmap
import os

FIELDS = ("pid", "command", "phase", "looks", "number", "torn", "wrong", "backwards")
GO_ON, EXIT = range(2)  # commands to a worker
WAITING, COMPUTING = range(2)  # phases


class Row:
    """One life of one worker. Each field has one writer."""

    def __init__(self, path: str):
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * len(FIELDS))
        self._map = mmap.mmap(fd, 8 * len(FIELDS))
        os.close(fd)

    def __getitem__(self, name: str) -> int:
        place = 8 * FIELDS.index(name)
        return int.from_bytes(self._map[place : place + 8], "little")

    def __setitem__(self, name: str, value: int) -> None:
        place = 8 * FIELDS.index(name)
        self._map[place : place + 8] = value.to_bytes(8, "little")
