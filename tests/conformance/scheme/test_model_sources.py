"""Whose weights are sent and applied: what send() got, what a subclass prepares, the explicit model, the context."""

import pickle

import pytest

from shmsync.schemes import WeightStrategy
from support.conformance.contexts import Context
from support.conformance.nets import Stamped

UNRELATED = {"string": "mlp", "number": 7, "list": [1, 2], "dict": {"lr": 0.1}, "object": object(), "nothing": None}


# ---- prepare_weights() of a subclass


@pytest.mark.parametrize("sent", [None, "best"])
def test_override_gets_what_was_sent_and_may_supply_the_weights(make, sent):
    got = []

    def prepare_weights(self, weights, model_id, strategy, context=None):
        got.append((weights, model_id, type(strategy), context))
        return Stamped(4).state_dict()

    rig = make(prepares=prepare_weights)  # no context and no model: the override is all there is
    assert rig.deliver(sent) == 1
    assert rig.stamps() == [4, 4]
    assert got == [(sent, "policy", WeightStrategy, None)]


# ---- the model of the trainer


def test_explicit_model_wins_over_the_context(make):
    context = Context(policy=Stamped(1), model=Stamped(2))
    rig = make(context=context, given={"model": Stamped(3)})
    rig.deliver()
    assert rig.stamps() == [3, 3]
    rig.deliver("policy")  # its own id
    assert rig.stamps() == [3, 3]
    assert b"Stamped" not in pickle.dumps(rig.sender)  # no model travels along


@pytest.mark.parametrize("value", UNRELATED)
def test_unrelated_attribute_of_the_context_is_never_sent(make, value):
    context = Context(policy=UNRELATED[value])
    rig = make(context=context)
    with pytest.raises(ValueError, match="there are no weights to send"):
        rig.sender.send()
    context._fallback_policy = Stamped(6)
    assert rig.deliver() == 1
    assert rig.stamps() == [6, 6]


# ---- the model of a worker


@pytest.mark.parametrize("value", [each for each in UNRELATED if each != "nothing"])
def test_unrelated_attribute_of_a_workers_context_is_no_model(scheme, ends, value):
    context = Context(policy=UNRELATED[value])
    scheme.init_on_worker("policy", context, **ends.worker)
    receiver = scheme.get_receiver()
    with pytest.raises(ValueError, match="under 'policy' is a .*which has no weights"):
        receiver._resolve_model_ref()
    context.policy = net = Stamped(0)  # made later
    assert receiver._resolve_model_ref() is net
