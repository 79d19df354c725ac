"""A web server of the contest in section.py, run by uvicorn. It computes with the newest weights that it has.

The environment says how it gets them: WAY is shmsync, file or copy, MODEL is mlp or cnn. An answer has the version, the
first and the last weight that it was computed with, and the server's pid.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
from multiprocessing.connection import Client
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import shmsync


def mlp() -> nn.Module:
    """200 MB."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(2041, 2041), nn.ReLU())]
    return nn.Sequential(*layers).requires_grad_(False)


def cnn() -> nn.Module:
    sizes = [3, 16, 32, 32]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Conv2d(a, b, 3, 2), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 9, 6)).requires_grad_(False)


MODELS = {"mlp": (mlp, (1, 2041)), "cnn": (cnn, (1, 3, 32, 32))}
SOURCE = os.environ.get("SOURCE", "")  # the arena's name, the file, or the address of the trainer


class Shared:
    """A bound module: it shows new weights without a load."""

    def __init__(self, module: nn.Module) -> None:
        self.sub = shmsync.Subscriber(SOURCE, timeout=60)
        self.module = self.sub.bind(module)

    def compute(self, x: torch.Tensor) -> dict[str, Any]:
        with self.sub.read() as section:
            return {"version": section.version, **ends(self.module, x)}


class Private:
    """A private copy of the weights, and their version."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.version = module, 0

    def compute(self, x: torch.Tensor) -> dict[str, Any]:
        return {"version": self.version, **ends(self.module, x)}

    def take(self, state: dict[str, torch.Tensor]) -> None:
        self.version = int(state.pop("version"))
        self.module.load_state_dict(state, assign=True)


class Loaded(Private):
    """Loads the file when a signal announces a new one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.take(load_file(SOURCE))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: self.take(load_file(SOURCE)))


class Fed(Private):
    """A thread takes new weights from a pipe."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.pipe, first = Client(SOURCE), threading.Event()
        loop = asyncio.get_running_loop()

        def receive() -> None:
            while True:
                try:
                    names, shapes = self.pipe.recv()
                    state = {
                        name: torch.frombuffer(bytearray(self.pipe.recv_bytes()), dtype=torch.float32).view(shape)
                        for name, shape in zip(names, shapes, strict=True)
                    }
                except (EOFError, OSError):
                    return
                if first.is_set():
                    loop.call_soon_threadsafe(self.take, state)
                else:
                    self.take(state)
                    first.set()

        threading.Thread(target=receive, daemon=True).start()
        first.wait(60)


WAYS = {"shmsync": Shared, "file": Loaded, "copy": Fed}


def ends(module: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Compute, and say with which weights."""
    module(x)
    weights = list(module.parameters())
    return {"first": weights[0].flatten()[0].item(), "last": weights[-1].flatten()[-1].item()}


class App:
    def __init__(self) -> None:
        self.server: Any = None
        self.x: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            torch.set_num_threads(1)
            make, shape = MODELS[os.environ["MODEL"]]
            self.server, self.x = WAYS[os.environ["WAY"]](make()), torch.ones(shape)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        with torch.no_grad():
            body = json.dumps(self.server.compute(self.x) | {"pid": os.getpid()}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


app = App()
