"""An Evaluator of TorchRL in a separate process: it is given weights, and its worker's policy has them."""

from __future__ import annotations

import contextlib

import pytest
from tensordict import TensorDict
from torchrl.collectors import Evaluator

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl import parts
from support.torchrl.environments import Steps
from support.torchrl.policies import Tagged


@contextlib.contextmanager
def evaluating():
    with parts.starting():
        evaluator = Evaluator(
            Steps,
            policy_factory=Tagged,
            max_steps=5,
            frames_per_batch=10,
            backend="process",
            weight_sync_schemes={"policy": ShmWeightSyncScheme(timeout=60)},
        )
        try:
            yield evaluator
        finally:
            evaluator.shutdown()


@pytest.mark.parametrize(
    "form", [lambda made: made, lambda made: TensorDict.from_module(made).data], ids=["module", "td"]
)
def test_each_evaluation_has_the_weights_it_was_given(form):
    with evaluating() as evaluator:
        for tag in (1, 2):
            evaluator.evaluate(weights=form(Tagged(tag)), step=tag)
            assert tag_in_the_worker(evaluator) == tag


def tag_in_the_worker(evaluator):
    state = evaluator._backend._collector.state_dict()["worker0"]["policy_state_dict"]
    (tag,) = {float(weight.mean()) for weight in state.values()}
    return tag
