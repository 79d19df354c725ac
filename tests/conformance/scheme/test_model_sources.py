"""Whose weights are sent and applied: what send() got, what a subclass prepares, the explicit model, the context."""

import pickle

import pytest

from shmsync.schemes import SharedMemWeightSyncScheme, WeightStrategy
from support.conformance.contexts import Context, Lookup
from support.conformance.nets import Stamped, held, shared

UNRELATED = ["mlp", 7, [1, 2], {"lr": 0.1}, object(), None]


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


def test_unrelated_attribute_of_the_context_is_never_sent(make):
    context = Context()
    rig = make(context=context)
    for context.policy in UNRELATED:
        with pytest.raises(ValueError, match="there are no weights to send"):
            rig.sender.send()
    context._fallback_policy = Stamped(6)
    assert rig.deliver() == 1
    assert rig.stamps() == [6, 6]


# ---- the model of a worker


def test_an_arena_that_is_named_before_the_worker_has_a_model_serves_the_first_send(pipe):
    trainers = SharedMemWeightSyncScheme(policy_weights={"policy": shared(Stamped(1))})
    workers, context = SharedMemWeightSyncScheme(), Lookup(models={})
    trainers.init_on_sender("policy", pipes=[pipe[0]])
    workers.init_on_worker("policy", context, pipe=pipe[1])
    receiver = workers.get_receiver()
    assert not receiver.receive(timeout=1)
    context.models["policy"] = Stamped(0)
    trainers.get_sender().send_async()
    assert receiver.receive(timeout=60)
    trainers.get_sender().wait_async(timeout=60)
    assert held(context.models["policy"])["count"] == 1
    for scheme in (workers, trainers):
        scheme.shutdown()
