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
from support.torchrl.policies import Growing, Tagged

if torchrl.__version__.startswith("0.13"):
    pytest.skip("servers with a policy_version came with TorchRL 0.14", allow_module_level=True)
KINDS = ["thread", "process"]
REQUEST = TensorDict({"observation": torch.ones(1)}, [])


class Another:
    """A context of a user's own."""

    def __init__(self):
        self.told = []

    def update_policy_weights_(self, *, model_id, policy_or_weights):
        self.told.append((model_id, float(policy_or_weights["tag"])))


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


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_counted_once(sender, kind, slots):
    scheme = sender(Tagged(), slots=slots)
    with serving(kind, scheme) as (server, client):
        for update in range(1, 6):
            scheme.send(Tagged(update))
            assert server.policy_version == update
            if update > 2:  # before, it has no requests
                found = client(REQUEST.clone())
                assert int(found["tag"]) == int(found["policy_version"]) == update
        stats = server.stats()
        assert (stats["policy_version"], stats["weight_updates"]) == (5, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_versions_that_were_sent_before_it_started_are_counted(sender, kind):
    scheme = sender(Tagged(), sync=False)
    scheme.send(Tagged(1))
    scheme.send(Tagged(2))
    scheme.sync = True
    with serving(kind, scheme, policy_version=10) as (server, client):
        assert server.policy_version == 12
        scheme.send(Tagged(3))
        found = client(REQUEST.clone())
        assert (int(found["tag"]), int(found["policy_version"])) == (3, 13)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_gives_the_version_that_made_it(sender, kind, sync):
    scheme = sender(Tagged(), sync=sync)
    stop, sent = threading.Event(), [0]

    def update():
        while not stop.is_set():
            sent[0] += 1
            scheme.send(Tagged(sent[0]))
            stop.wait(0.0005)

    thread = threading.Thread(target=update)
    with serving(kind, scheme, make=functools.partial(Tagged, pause=0.001)) as (server, client):
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


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_need_another_arena_are_counted_too(sender, kind):
    scheme = sender(Growing())
    with serving(kind, scheme, make=Growing) as (server, client):
        for update, size in enumerate([10, 100_000, 5, 1_000_000], 1):
            scheme.send(Growing(update, ["x" * size]))
            assert server.policy_version == update
            assert int(client(REQUEST.clone())["policy_version"]) == update
        assert server.stats()["weight_updates"] == 4


def test_any_context_is_called_once_for_each_version(sender):
    scheme, context, model = sender(Tagged()), Another(), Tagged()
    receiver = pickle.loads(pickle.dumps(scheme))
    receiver.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    receiver.context = context
    receiver.connect(worker_idx=0)
    for update in (1, 2, 3):
        scheme.send(Tagged(update))
        assert receiver.receive() is not None and receiver.receive() is None  # whichever thread applied it
    assert context.told == [("policy", update) for update in (1, 2, 3)]
    receiver.shutdown()
