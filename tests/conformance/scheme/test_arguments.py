"""What init_on_sender(), init_on_worker() and register_worker() take, and the life of a scheme."""

import math
import pickle

import pytest

from shmsync.errors import ClosedError
from support.conformance.nets import Stamped
from support.conformance.rigs import KINDS, rigs
from support.conformance.table import NONE

# ---- keyword arguments


def test_unknown_argument_of_init_on_sender_names_the_known_ones(scheme, ends):
    with pytest.raises(TypeError, match=r"init_on_sender\(\) takes no colour=.*it takes .*model.*num_workers"):
        scheme.init_on_sender("policy", colour="red", **ends.sender)
    with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) before"):
        scheme.get_sender()


def test_unknown_argument_of_init_on_worker_names_the_known_ones(scheme, ends):
    with pytest.raises(TypeError, match=r"init_on_worker\(\) takes no inplace=.*it takes .*model"):
        scheme.init_on_worker("policy", model=Stamped(), inplace=True, **ends.worker)
    with pytest.raises(RuntimeError, match=r"call init_on_worker\(\) before"):
        scheme.get_receiver()


NO_INDICES = ["a", -1, True, 1.5]


def test_registering_a_worker_under_no_index_is_refused(scheme, ends):
    scheme.init_on_sender("policy", **ends.sender)
    sender = scheme.get_sender()
    for index in (*NO_INDICES, None):
        with pytest.raises(ValueError, match=f"worker is a whole number .*, not {index!r}"):
            sender.register_worker(index, ends.transport)
    assert sender.worker_ids == [0]


# ---- the life of a scheme


def test_with_ends_the_scheme(any_entry, ends):
    with any_entry.make() as scheme:
        scheme.init_on_sender("policy", **ends.sender)
        sender = scheme.get_sender()
        assert sender.worker_ids == [0]
    for use in (
        lambda: scheme.init_on_sender("policy", **ends.sender),
        lambda: scheme.init_on_worker("policy", model=Stamped(), **ends.worker),
        scheme.get_sender,
        scheme.get_receiver,
        scheme.__enter__,
        lambda: sender.send(Stamped(1)),
        lambda: sender.send_async(Stamped(1)),
    ):
        with pytest.raises(ClosedError, match="was shut down.*make a new one"):
            use()
    scheme.shutdown()  # may be repeated


def test_copy_of_a_scheme_that_is_over_is_a_new_one(scheme, ends):
    scheme.shutdown()
    with pickle.loads(pickle.dumps(scheme)) as copy:
        copy.init_on_sender("policy", **ends.sender)
        assert copy.get_sender().worker_ids == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_keep_their_weights_when_the_trainers_scheme_ends(kind):
    with rigs(kind) as make:
        rig = make()
        with rig.scheme:
            rig.deliver(Stamped(3))
        assert rig.stamps() == [3, 3]


def test_a_timeout_is_0_or_more_seconds_and_none_is_the_default(any_entry):
    if any_entry is NONE:
        return
    default = any_entry.make().timeout
    assert any_entry.make(timeout=None).timeout == default > 0
    assert any_entry.make(timeout=math.inf).timeout == math.inf
    for wrong in (-1, math.nan, "2", True):
        with pytest.raises(ValueError, match="timeout must be 0 or more seconds"):
            any_entry.make(timeout=wrong)
