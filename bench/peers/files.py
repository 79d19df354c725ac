"""A file of safetensors in /dev/shm, written beside the last one and renamed over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from peers import session


class FileReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, path: Path) -> None:
        super().__init__(pipe, hold)
        self.path = path

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        yield list(load_file(self.path).values())


class File(session.Session):
    def start(self) -> None:
        self.home = tempfile.TemporaryDirectory(dir="/dev/shm", prefix=session.FILES.format(pid=os.getpid()))
        self.path = Path(self.home.name, "weights.safetensors")
        self.crew = session.Crew(FileReader, [(self.path,)] * self.count, self.folder)

    def send(self) -> None:
        made = self.path.with_suffix(".made")
        save_file({f"leaf{number}": leaf for number, leaf in enumerate(self.leaves)}, made)
        os.replace(made, self.path)
        self.crew.wake()

    def close(self) -> None:
        super().close()
        self.home.cleanup()
