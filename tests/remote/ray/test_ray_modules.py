"""Weights for modules inside actors, for actors that TorchRL brings, and what happens without Ray."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("ray", reason="these tests need Ray, which shmsync[ray] brings")

import ray

from shmsync import RayActorTransport, RayModuleTransformScheme
from support.conformance.contexts import Context
from support.remote import ray_parts as parts
from support.weights import fill

pytestmark = pytest.mark.slow  # Ray starts for a minute; the three kinds of actors are in conformance/ too

MODEL_ID = "env.transform[0]"


@pytest.fixture(autouse=True)
def crew(one_ray):
    """Two actors with a module. A test kills none of them."""
    return parts.crew({MODEL_ID: RayModuleTransformScheme()}, ["", ""])


@pytest.fixture
def actor(crew):
    """One of them."""
    return crew[0]


def sender_of(*args, strategy="tensordict", **kwargs):
    scheme = RayModuleTransformScheme(strategy, timeout=math.inf)
    scheme.init_on_sender(MODEL_ID, *args, **kwargs)
    return scheme.get_sender()


def test_a_transport_without_an_actor_does_nothing_until_it_has_one(actor):
    with pytest.raises(ValueError, match="'tensordict' or 'state_dict', not 'pickle'"):
        RayActorTransport(actor, "pickle")
    transport = RayActorTransport()
    assert not transport.check_connection()
    transport.send_weights(MODEL_ID, {"weight": torch.ones(1)})
    transport.send_weights_async(MODEL_ID, {"weight": torch.ones(1)})
    transport.wait_ack()
    with pytest.raises(RuntimeError, match="pending"):
        transport.wait_ack()
    transport.set_actor(actor)
    assert transport.check_connection()
    transport.send_weights(MODEL_ID, parts.net(5.0).state_dict())
    assert ray.get(actor.look.remote(MODEL_ID))[0] == 5.0
    transport.set_actor(None)
    transport.send_weights(MODEL_ID, parts.net(6.0).state_dict())
    assert ray.get(actor.look.remote(MODEL_ID))[0] == 5.0


@pytest.mark.parametrize(("strategy", "name"), [("tensordict", "actors"), ("state_dict", "actor_refs")])
def test_actors_can_be_given(crew, actor, name, strategy):
    sender = sender_of(strategy=strategy, **{name: [crew[0], Context(_actor=crew[1])]})
    for version in (1, 2):
        assert sender.send(parts.net(version)) == version
        assert parts.ask(crew, "look", MODEL_ID) == [(float(version), version)] * 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_actor_is_found_in_the_context_when_it_is_first_needed(actor, wrapped):
    context = Context(env=Context(transform=[]))
    sender = sender_of(context)
    with pytest.raises(ValueError, match=r"no actor under 'env.transform\[0\]'"):
        sender.send(parts.net(1.0))
    context.env.transform.append(Context(_actor=actor) if wrapped else actor)
    assert sender.send(parts.net(1.0)) == 1
    assert ray.get(actor.look.remote(MODEL_ID)) == (1.0, 1)


def test_a_source_model_is_read_again_at_each_send(actor):
    model = parts.net(1.0)
    context = Context(env=Context(transform=[actor]))
    sender = sender_of(context, source_model=model)
    for version in (1, 2):
        fill(model, version)
        assert sender.send() == version
        assert ray.get(actor.look.remote(MODEL_ID)) == (float(version), version)


def test_fan_out_binds_the_module_to_shared_memory(crew):
    scheme = RayModuleTransformScheme(fan_out="node", timeout=math.inf)
    scheme.init_on_sender(MODEL_ID, actors=crew)
    for version in (1, 2):
        assert scheme.get_sender().send(parts.net(version)) == version
        assert parts.ask(crew, "look", MODEL_ID) == [(float(version), version)] * 2
    scheme.shutdown()


def test_torchrls_own_module_transform_takes_what_is_sent():
    pytest.importorskip("torchrl.envs", reason="it is TorchRL's, of shmsync[torchrl]")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.envs.transforms.module import RayModuleTransform

    module = TensorDictModule(parts.net(0.0), ["observation"], ["embedded"])
    transform = RayModuleTransform(module=module, no_grad=True, num_cpus=0)
    context = Context(env=Context(transform=[transform]))
    # In this order: what TorchRL's actor does with a TensorDict leaves a module that takes no such state_dict.
    for value, strategy in enumerate(["state_dict", "state_dict", "tensordict", "tensordict"], 1):
        fill(module, value)
        sender_of(context, strategy=strategy, source_model=module).send()
        embedded = transform(TensorDict({"observation": torch.ones(parts.SIZE)}))["embedded"]
        assert torch.equal(embedded, torch.full((parts.SIZE,), value * (parts.SIZE + 1.0)))
    ray.kill(transform._actor)


def test_without_ray_the_classes_import_and_their_use_names_the_extra():
    program = """
import sys
sys.modules["ray"] = None
import torch
import shmsync
from shmsync import RayActorTransport, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme, RayWeightUpdater
uses = [
    RayTransport,
    RayActorTransport,
    lambda: RayWeightSyncScheme().init_on_sender("policy", remote_collectors=[]),
    lambda: RayModuleTransformScheme().init_on_sender("policy", actors=[]),
    lambda: RayWeightUpdater(torch.nn.Linear(1, 1), []).push_weights(),
]
for number, use in enumerate(uses):
    try:
        use()
        print(number, "passed")
    except ImportError as error:
        print(number, "shmsync[ray]" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{number} True" for number in range(5)]
