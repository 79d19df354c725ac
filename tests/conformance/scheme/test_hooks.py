"""What subclasses of senders and receivers may override takes effect in every kind of them."""

import pytest

from support.conformance.contexts import Context
from support.conformance.nets import Stamped, ask
from support.conformance.rigs import KINDS

# Where weights come in a call, the receiver has no transport.
SET_UP = [(kind, hook) for kind in KINDS for hook in ("_set_context", "_register_model")]
SET_UP += [(kind, "_register_worker_transport") for kind in KINDS if not kind.startswith("call")]


def recording(name, calls):
    """A method that notes what it gets, and does what it did before."""

    def method(self, *args, **kwargs):
        calls.append((name, args, kwargs))
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return {name: method}


def test_set_context_of_the_sender(make):
    calls, context = [], Context(policy=Stamped(3))
    rig = make(sender=recording("_set_context", calls), context=context)
    assert calls == [("_set_context", (context, "policy"), {})]
    assert rig.deliver() == 1
    assert rig.stamps() == [3, 3]


def test_resolve_model_ref_says_where_the_weights_go(make):
    other = Stamped(0)
    rig = make(receiver={"_resolve_model_ref": lambda self: other if self.worker_idx == 0 else rig.nets[1]})
    rig.deliver(Stamped(6))
    assert ask(other) == 6
    assert rig.stamps() == [0, 6]


@pytest.mark.parametrize(("kind", "hook"), SET_UP, indirect=["kind"])
def test_receiver_is_set_up_through_its_hooks(make, hook):
    calls = []
    rig = make(receiver=recording(hook, calls))
    assert [name for name, _, _ in calls] == [hook, hook]
    if hook == "_register_model":
        assert [args[0] for _, args, _ in calls] == rig.nets
    rig.deliver(Stamped(1))
    assert rig.stamps() == [1, 1]


# ---- a transport with two methods


@pytest.mark.parametrize("kind", ["own"], indirect=True)
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_two_methods_are_enough_for_sender_and_receiver(make, strategy):
    rig = make(strategy=strategy)
    assert rig.receivers[0].receive() is False
    assert [rig.sender.send(Stamped(value)) for value in (1, 2)] == [1, 2]
    assert [rig.receivers[0].receive() for _ in range(2)] == [True, True]
    rig.receive()
    assert rig.stamps() == [2, 1]
    assert rig.sender.send_async(Stamped(3), 0) == rig.sender.wait_async() == 3
    rig.receive()
    assert rig.stamps() == [3, 2]
    assert rig.receivers[1].receive() is False  # the last one was for the other worker
    with pytest.raises(RuntimeError, match="no send is pending"):
        rig.sender.wait_async()
    rig.sender.send_async(Stamped(4))
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        rig.sender.send(Stamped(4))
