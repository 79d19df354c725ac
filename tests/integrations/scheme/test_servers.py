"""TorchRL's inference servers count each version that they apply, and stamp what a forward returns with its own."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from multiprocessing import resource_sharer

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torchrl.modules import inference_server as servers

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import until
from support.torchrl import parts
from support.torchrl.policies import Tagged

if torchrl.__version__.startswith("0.13"):
    pytest.skip("servers with a policy_version came with TorchRL 0.14", allow_module_level=True)
REQUEST = TensorDict({"observation": torch.ones(1)}, [])


@contextlib.contextmanager
def serving(kind, sender, make=Tagged, **options):
    """A server that runs, and a client of it."""
    options = {"max_batch_size": 4, "weight_sync": sender, **options}
    if kind == "thread":
        options["weight_sync"] = pickle.loads(pickle.dumps(sender))
        server = servers.InferenceServer(make(), servers.ThreadingTransport(), **options)
        client = server.client()
    else:
        with parts.starting() as context:
            transport = servers.MPTransport(ctx=context)
            client = transport.client()
            server = servers.ProcessInferenceServer(
                policy_factory=make, transport=transport, mp_context=context, **options
            )
    with parts.starting(), server:
        client(REQUEST.clone())  # it has found its weights then
        yield server, client
    options["weight_sync"].shutdown()
    resource_sharer.stop(60)  # the thread that hands out tensors which were sent to a process


@pytest.fixture
def sender():
    """sender(model, ...) -> a scheme that sends to one server."""
    made = []

    def make(model, **options):
        made.append(ShmWeightSyncScheme(timeout=60, **options))
        made[-1].init_on_sender(model=model, devices=[torch.device("cpu")], model_id="policy")
        made[-1].connect()
        return made[-1]

    yield make
    for scheme in made:
        scheme.shutdown()


def test_each_version_is_counted_once(sender):
    scheme = sender(Tagged())
    with serving("process", scheme) as (server, client):
        for update in range(1, 6):
            scheme.send(Tagged(update))
            assert server.policy_version == update
            if update > 2:  # before, it has no requests
                found = client(REQUEST.clone())
                assert int(found["tag"]) == int(found["policy_version"]) == update
        stats = server.stats()
        assert (stats["policy_version"], stats["weight_updates"]) == (5, 5)


def test_an_output_gives_the_version_that_made_it(sender):
    scheme = sender(Tagged(), sync=False)
    stop, sent = threading.Event(), [0]

    def update():
        while not stop.is_set():
            sent[0] += 1
            scheme.send(Tagged(sent[0]))
            stop.wait(0.0005)

    thread = threading.Thread(target=update)
    with serving("thread", scheme, make=functools.partial(Tagged, pause=0.001)) as (server, client):
        thread.start()
        try:
            seen = set()
            while len(seen) < 20:
                found = client(REQUEST.clone())
                assert found["first"] == found["last"] == found["tag"] == found["policy_version"]
                seen.add(int(found["tag"]))
        finally:
            stop.set()
            thread.join()
        until(lambda: server.policy_version == sent[0])
        assert server.stats()["weight_updates"] == sent[0]
