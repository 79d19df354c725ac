"""Receiving, over every scheme: what receive() says, what it keeps, and what travels back when it fails."""

import pytest

from shmsync.errors import AckTimeout, ManifestMismatch, WriterDied
from support.calls import Call
from support.conformance import peers
from support.conformance.contexts import Context, Lookup
from support.conformance.nets import Stamped
from support.conformance.peers import hold, keep


class Stubborn(Exception):
    """Pickles, and fails on the way back."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Failing(Context):
    """A context whose model is not there yet when its receiver is made, and cannot be made later either."""

    def get_model(self, model_id):
        if not self.ready:
            raise KeyError(model_id)
        return model_of_worker(self)


def model_of_worker(context):
    if context.error is not None:
        raise context.error
    return context.model


def join_with_context(state, scheme, model_id, make, *args):
    """The worker knows its pipe and its model through a context alone."""
    state.models[model_id] = make(*args)
    state.context = Lookup(models=dict(state.models), worker_idx=state.index, **state.given)
    scheme.init_on_worker(model_id, state.context)
    keep(state, model_id, scheme)


def join_failing(state, scheme, model_id, *, unpicklable=False):
    state.models[model_id] = Stamped()
    error = Stubborn(1, 2) if unpicklable else ZeroDivisionError("no such model")
    state.context = Failing(model=state.models[model_id], error=error, ready=False, **state.given)
    scheme.init_on_worker(model_id, state.context)
    state.context.ready = True
    keep(state, model_id, scheme)


def mend(state):
    state.context.error = None
    hold(state, False)


def test_receive_says_whether_anything_came(fleet):
    sender = fleet.open()
    fleet.hold()
    worker = fleet.workers[0]
    assert worker.call(peers.receive) is False
    sending = Call(sender.send, Stamped(1))
    assert worker.call(peers.receive, timeout=60) is True
    assert worker.call(peers.receive) is False
    fleet.release()
    sending.result()


def test_receive_without_a_timeout_waits_as_long_as_the_scheme_says(fleet):
    sender = fleet.open(timeout=0.3)
    fleet.hold()
    assert fleet.workers[0].call(peers.receive, timeout=None) is False
    fleet.release()
    sender.send(Stamped(1), timeout=60)
    assert fleet.stamps() == [1, 1, 1]


def test_receive_applies_the_newest_of_what_has_come(fleet):
    sender = fleet.open()
    fleet.hold(0)
    for value in (1, 2, 3):
        sender.send_async(Stamped(value))
        with pytest.raises(AckTimeout):
            sender.wait_async(timeout=0.01)
    assert fleet.workers[0].call(peers.receive, timeout=60) is True
    assert fleet.stamps(workers=[0]) == [3]
    assert fleet.workers[0].call(peers.receive) is False


def test_context_gives_the_model(fleet):
    scheme = fleet.make()
    fleet.init_sender(scheme, "env.value_net")
    for worker in fleet.workers:
        worker.call(join_with_context, scheme, "env.value_net", Stamped)
    scheme.get_sender().send(Stamped(1))
    assert fleet.stamps("env.value_net") == [1, 1, 1]


def open_but_for_one(fleet, join, *args, **options):
    """A sender to workers of which number 1 joins in this way."""
    scheme = fleet.make()
    fleet.init_sender(scheme)
    for index in (0, 2):
        fleet.join(index, scheme)
    fleet.workers[1].call(join, scheme, "policy", *args, **options)
    return scheme.get_sender()


def test_exception_of_a_worker_raises_in_the_sender_with_its_traceback_and_the_others_have_the_weights(fleet):
    sender = open_but_for_one(fleet, peers.join, Stamped, 0, 9)  # it is 9 wide there
    with pytest.raises(ManifestMismatch, match=r"layer\.weight") as failed:
        sender.send(Stamped(1))
    trace = str(failed.value.__cause__)
    assert "worker 1 failed while it applied version 1 of 'policy'" in trace
    assert "Traceback (most recent call last)" in trace
    assert 'File "' in trace and "ManifestMismatch" in trace
    assert fleet.stamps() == [1, 0, 1]


def test_worker_that_failed_goes_on_and_may_be_mended(fleet):
    sender = open_but_for_one(fleet, join_failing)
    with pytest.raises(ZeroDivisionError) as failed:
        sender.send(Stamped(1))
    assert "in model_of_worker" in str(failed.value.__cause__)
    fleet.workers[1].call(mend)
    assert sender.send(Stamped(2)) == 2
    assert fleet.stamps() == [2, 2, 2]


def test_exception_that_cannot_be_pickled_raises_as_its_text(fleet):
    sender = open_but_for_one(fleet, join_failing, unpicklable=True)
    with pytest.raises(RuntimeError, match="Stubborn: 1 and 2") as failed:
        sender.send(Stamped(1))
    assert "in model_of_worker" in str(failed.value.__cause__)


def test_receive_raises_when_the_trainer_is_gone(fleet):
    fleet.open().send(Stamped(1))
    fleet.hold(0)
    fleet.pipes[0].close()
    with pytest.raises(WriterDied):
        fleet.workers[0].call(peers.receive, timeout=60)


def test_answers_for_two_models_on_one_pipe_may_be_awaited_in_any_order(fleet):
    policy, value = fleet.open("policy"), fleet.open("env.value_net")
    for version, order in ((1, (policy, value)), (2, (value, policy)), (3, (policy, value))):
        policy.send_async(Stamped(version))
        value.send_async(Stamped(10 + version))
        assert [sender.wait_async() for sender in order] == [version, version]
        assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([version] * 3, [10 + version] * 3)
