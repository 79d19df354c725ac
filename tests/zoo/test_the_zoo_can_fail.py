"""Faults that shmsync once had, put back: the zoo must find each of them."""

from __future__ import annotations

import pytest
import torch

from shmsync.engine import subscriber
from shmsync.engine.bind import binding, guard
from shmsync.engine.bind import install_guards as covering
from shmsync.engine.bind import read_guard as cover
from shmsync.engine.bind.guarded_methods import calls_of
from shmsync.engine.bind.read_guard import Cover
from support.zoo.modes import MODES
from support.zoo.world import visit
from support.zoo.zoo import USES


def only(patch, wanted):
    patch.setattr(covering, "calls_of", lambda module, _: [c for c in calls_of(module, True) if wanted(c.method)])


def forward_alone(patch):
    """Only the module's forward is guarded, no method."""
    only(patch, lambda method: method == "forward")


def hooks_outside(patch):
    """Pre-hooks run before the section begins."""
    only(patch, lambda method: method != guard.CALL)


def first_tensors_for_ever(patch):
    """A tensor that takes the place of another one is not bound."""
    patch.setattr(binding.Binding, "_follow", lambda self: None)


def old_casts(patch):
    """Autocast goes on with its casts of the first version."""
    patch.setattr(torch, "clear_autocast_cache", lambda: None)


def bypass(patch):
    """Code that the user compiled goes past the guards."""
    patch.setattr(guard, "_covered", torch._dynamo.assume_constant_result(lambda number: True))


def last_binding_alone(patch):
    """The second of two bindings of a module ends the first."""
    patch.setattr(covering, "taken_over", lambda module, tensors: binding.companions(module))


def generators_let_go(patch):
    """A generator's section ends before its first step."""
    patch.setattr(Cover, "_held", lambda self, generator: generator)


def nobody_together(patch):
    """Calls of a module that two arenas feed are sections of the last one alone."""
    patch.setattr(covering, "companions", lambda module: [])
    patch.setattr(Cover, "absorb", lambda self, other: None)
    patch.setattr(Cover, "drop_ended", lambda self, taken: self.members.clear())


def one_version_for_all_threads(patch):
    """`version` is the applied one, whichever thread has applied it."""
    patch.setattr(subscriber.Subscriber, "version", property(lambda self: self.stats().version))


def tensors_alone(patch):
    """Of what a call returns, only tensors and lists of them are looked at."""
    patch.setattr(cover, "unalias", lambda out, aliases, given: out)


@pytest.mark.parametrize(
    ("fault", "use", "mode"),
    [
        (forward_alone, "agent.get_value", "plain"),
        (hooks_outside, "hooked", "plain"),
        (first_tensors_for_ever, "batched", "plain"),
        (old_casts, "mlp", "autocast_loop"),
        (bypass, "policy.predict", "called_by_compiled_code"),
        (last_binding_alone, "policy", "two_arenas"),
        (generators_let_go, "decoder.stream", "plain"),
        (nobody_together, "policy", "two_arenas"),
        (one_version_for_all_threads, "policy", "several_threads"),
        (tensors_alone, "returning.dist", "plain"),
        (tensors_alone, "returning.held", "several_threads"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_found(fault, use, mode, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is shown|has changed with later|not what the trainer computed"):
        for seed in range(10):
            for slots in (1, 2, 3):
                visit(USES[use], MODES[mode], slots, seed)
