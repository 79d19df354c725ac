"""Sending, over every scheme: who gets what, which version it has, what is refused."""

import pytest
import torch
from tensordict import TensorDict

from shmsync.errors import AckTimeout, ManifestMismatch
from support.calls import naming
from support.conformance.contexts import Context
from support.conformance.nets import FORMS, Stamped, Tied, numbers, stamp
from support.conformance.peers import keep, look, receive


def receive_and_look(state):
    return receive(state, timeout=60), look(state)


def join_with_tensordict(state, scheme):
    """The worker's model is a TensorDict, not a module."""
    state.models["policy"] = TensorDict.from_module(Stamped(0)).data.clone()
    scheme.init_on_worker("policy", model=state.models["policy"], **state.given)
    keep(state, "policy", scheme)


def values(state):
    return numbers(state.models["policy"])


def test_send_returns_a_version_that_grows(fleet):
    sender = fleet.open()
    assert [sender.send(Stamped(5)), sender.update_weights(Stamped(6)), sender.send(Stamped(7))] == [1, 2, 3]
    assert fleet.stamps() == [7, 7, 7]
    assert sender.version == 3
    assert fleet.versions() == [3, 3, 3]


def test_a_module_follows_its_state_dict_which_lacks_a_buffer(fleet):
    sender = fleet.open("policy", Tied)
    assert sender.send(Tied(1).state_dict()) == 1
    module = Tied(2)
    assert [sender.send(stamp(module, value)) for value in (2, 3)] == [2, 3]
    low, high = zip(*(stamp if isinstance(stamp, tuple) else (stamp,) * 2 for stamp in fleet.stamps()), strict=True)
    assert set(high) == {3} and set(low) <= {0, 3}  # the buffer may stay the worker's own


def test_send_has_been_applied_when_it_returns(fleet):
    sender = fleet.open()
    fleet.hold()
    for worker in fleet.workers:
        worker.start(receive_and_look)
    sender.send(Stamped(1))
    assert [worker.result() for worker in fleet.workers] == [(True, 1)] * 3


def test_worker_ids_choose_who_gets_it(fleet):
    sender = fleet.open(**fleet.entry.alone)
    chosen = [(1, [0, 1, 0]), ([0, 2], [2, 1, 2]), ([2], [2, 1, 3]), (None, [4, 4, 4])]
    for version, (worker_ids, stamps) in enumerate(chosen, 1):
        assert sender.send(Stamped(version), worker_ids) == version
        assert fleet.stamps() == stamps
    assert fleet.versions() == [4, 4, 4]


def test_weights_of_every_form_arrive_and_may_change_from_send_to_send(fleet):
    sender = fleet.open()
    by_initial = {form[0]: make for form, make in FORMS.items()}
    for value, initial in enumerate("mstnm", 1):
        sender.send(by_initial[initial](value))
        assert fleet.stamps() == [value] * 3


def test_send_without_weights_takes_the_contexts_model(fleet):
    context = Context(policy=Stamped(3))
    sender = fleet.open(given={"context": context})
    sender.send()
    assert fleet.stamps() == [3, 3, 3]
    stamp(context.policy, 4)
    sender.send()
    assert fleet.stamps() == [4, 4, 4]


def test_a_pending_send_refuses_others_until_it_is_waited_for_once(fleet):
    sender = fleet.open()
    for version in (1, 2):
        with pytest.raises(RuntimeError, match="no send is pending"):
            sender.wait_async()
        sender.send_async(Stamped(1))
        for call in (sender.send, sender.send_async):
            with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
                call(Stamped(2))
        assert sender.wait_async() == version
    assert sender.send(Stamped(3)) == 3
    assert fleet.stamps() == [3, 3, 3]


def test_wait_async_raises_what_send_would_and_leaves_nothing_pending(fleet):
    sender = fleet.open()
    fleet.hold(2)
    sender.send_async(Stamped(1))
    assert fleet.stamps(workers=[0, 1]) == [1, 1]
    with naming(AckTimeout, [2]):
        sender.wait_async(timeout=0.5)
    with pytest.raises(RuntimeError, match="no send is pending"):
        sender.wait_async()
    fleet.release(2)
    assert sender.send(Stamped(2)) == 2
    assert fleet.stamps() == [2, 2, 2]


def test_weights_that_change_after_the_send_stay_with_the_trainer(fleet):
    sender, net = fleet.open(), Stamped(1)
    sender.send(net)
    stamp(net, 2)
    assert not any(tensor.is_shared() for tensor in net.state_dict().values())
    assert fleet.stamps() == [1, 1, 1]


def test_weights_that_do_not_fit_raise_and_change_nobody(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    fits = Stamped(2).state_dict()
    missing = {key: value for key, value in fits.items() if key != "layer.bias"}
    unexpected, mismatched = {**fits, "more.bias": torch.zeros(2)}, {**fits, "layer.bias": torch.zeros(3)}
    for weights, named in ((missing, "layer.bias"), (unexpected, "more.bias"), (mismatched, "layer.bias")):
        with pytest.raises(ManifestMismatch, match=named):
            sender.send(weights)
        assert fleet.stamps() == [1, 1, 1]
    sender.send(Stamped(3))
    assert fleet.stamps() == [3, 3, 3]


def test_worker_may_hold_its_weights_in_a_tensordict(fleet):
    scheme = fleet.make()
    fleet.init_sender(scheme)
    for worker in fleet.workers:
        worker.call(join_with_tensordict, scheme)
    scheme.get_sender().send(Stamped(3))
    assert [worker.call(values) for worker in fleet.workers] == [{3.0}] * 3
