"""Worker processes with a pipe each, for the engines that do not start workers themselves."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from remote.cell import FAR
from shmsync.schemes.remote.nodes import NODE_VARIABLE

CONTEXT = multiprocessing.get_context("forkserver")  # one process imports for all workers
PATIENCE = timedelta(seconds=60)
Answer = Callable[..., Any]


def join_group(rank: int, workers: int, store: torch.distributed.Store) -> None:
    store = torch.distributed.PrefixStore("group", store)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=workers + 1, timeout=PATIENCE)


class Crew:
    """Workers 1 to N; the trainer is 0. `make(rank, workers, store)` gives in each the function that answers asks."""

    def __init__(self, module: str, make: Callable[..., Answer], nodes: int, workers: int) -> None:
        CONTEXT.set_forkserver_preload([module])
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
        pairs = [CONTEXT.Pipe() for _ in range(workers)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            CONTEXT.Process(target=_work, args=(make, rank, workers, self.store.port, nodes > 1, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self._asked = False

    def tell(self, *question: Any) -> None:
        """Ask all, as soon as they have answered what came before; answers() waits."""
        self.answers()
        for pipe in self._pipes:
            pipe.send(question)
        self._asked = True

    def answers(self) -> list[Any]:
        asked, self._asked = self._asked, False
        return [pipe.recv() for pipe in self._pipes] if asked else []

    def ask(self, *question: Any) -> list[Any]:
        self.tell(*question)
        return self.answers()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            for path in Path("/dev/shm").glob(f"shmsync.{process.pid}-*"):  # a relay's, which it could not remove
                path.unlink(missing_ok=True)


def _work(make: Callable[..., Answer], rank: int, workers: int, port: int, far: bool, pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        if far:
            os.environ[NODE_VARIABLE] = FAR
        store = torch.distributed.TCPStore("127.0.0.1", port, None, False, PATIENCE)
        answer = make(rank, workers, store)
        while True:
            pipe.send(answer(*pipe.recv()))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
