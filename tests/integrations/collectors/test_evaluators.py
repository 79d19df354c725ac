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


@pytest.mark.slow
def test_each_evaluation_has_the_weights_it_was_given():
    with evaluating() as evaluator:
        for tag, weights in ((1, Tagged(1)), (2, TensorDict.from_module(Tagged(2)).data)):
            evaluator.evaluate(weights=weights, step=tag)
            assert tag_in_the_worker(evaluator) == tag


def tag_in_the_worker(evaluator):
    state = evaluator._backend._collector.state_dict()["worker0"]["policy_state_dict"]
    (tag,) = {float(weight.mean()) for weight in state.values()}
    return tag
