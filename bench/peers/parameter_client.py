"""Sample Factory's ParameterServer and ParameterClientAsync: shared weights, a lock, a copy in each worker.

Its inference workers look for a new version before each batch; here a byte over a pipe lets them look.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.model_sharing import ParameterClientAsync, ParameterServer
from sample_factory.utils.timing import Timing
from sample_factory.utils.utils import log
from torch import nn

from peers import session
from peers.weights import build


class Model(nn.Module):
    """What Sample Factory asks of a model."""

    def __init__(self, cfg: Any, *_spaces: Any) -> None:
        super().__init__()
        self.leaves = build(cfg.size)

    def model_to_device(self, device: torch.device) -> None:
        self.to(device)


class ClientReader(session.Reader):
    def __init__(self, pipe: Connection, hold: Any, server: ParameterServer, size: str, weights: Any) -> None:
        super().__init__(pipe, hold)
        log.setLevel("ERROR")
        global_model_factory().register_actor_critic_factory(Model)
        spaces = SimpleNamespace(obs_space=None, action_space=None)
        self.client = ParameterClientAsync(server, SimpleNamespace(size=size), spaces, Timing())
        self.client.on_weights_initialized(weights, torch.device("cpu"), 0)
        model = self.client.actor_critic
        model.register_load_state_dict_post_hook(lambda *_: hold())  # inside the lock
        self.weights = list(model.parameters())

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        self.client.ensure_weights_updated()
        yield self.weights


class Client(session.Session):
    def start(self) -> None:
        log.setLevel("ERROR")
        self.model = Model(SimpleNamespace(size=self.size)).share_memory()
        self.shared = list(self.model.parameters())
        self.server = ParameterServer(0, torch.zeros(1, dtype=torch.int64).share_memory_(), serial_mode=False)
        self.server.init(self.model, 0, torch.device("cpu"))
        arguments = [(self.server, self.size, self.model.state_dict())] * self.count
        self.crew = session.Crew(ClientReader, arguments, self.folder)
        self.version = 0

    def send(self) -> None:
        self.version += 1
        with self.server.policy_lock:  # as its learner does for a step of the optimizer
            torch._foreach_copy_(self.shared, self.leaves)
        self.server.update_weights(self.version)
        self.crew.wake()
