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
