"""Differences from TorchRL's API that no other test is about; docs/coming-from-torchrl.md has a row for each."""

import pytest

from shmsync.schemes import (
    MultiProcessWeightSyncScheme,
    RPCTransport,
    WeightStrategy,
    WeightSyncScheme,
)
from support.calls import Call
from support.conformance.nets import Stamped, ask
from support.conformance.rigs import KINDS, BoxRig, BoxScheme, PipeRig, rigs


def test_strategy_of_a_scheme_is_the_name_of_a_form(scheme):
    assert scheme.strategy in ("state_dict", "tensordict")
    made = scheme.make_strategy()
    assert isinstance(made, WeightStrategy) and made.extract_as == scheme.strategy


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_always_written_in_place(kind):
    with rigs(kind) as make:
        for applying, given in ((make().receivers[0], [Stamped(1).state_dict()]), (WeightStrategy(), [{}, {}])):
            with pytest.raises(TypeError, match="inplace"):
                applying.apply_weights(*given, inplace=False)


def test_nothing_is_applied_behind_the_workers_back(rig_of):
    rig = rig_of(PipeRig, MultiProcessWeightSyncScheme)
    rig.sender.send_async(Stamped(1))
    with pytest.raises(TimeoutError):
        rig.sender.wait_async(timeout=0.2)
    assert rig.stamps() == [0, 0]
    rig.receive()
    assert rig.stamps() == [1, 1]


def test_receiver_refuses_weights_of_another_model(rig_of):
    rig = rig_of(BoxRig, BoxScheme)
    rig.pipes[0].letters.append(("env.value_net", Stamped(1).state_dict()))
    with pytest.raises(ValueError, match=r"weights of 'env\.value_net' came to the receiver of 'policy'"):
        rig.receivers[0].receive()
    with pytest.raises(ValueError, match=r"'env\.value_net'"):
        rig.receivers[0].apply_weights(("env.value_net", Stamped(1).state_dict()))
    assert ask(rig.nets[0]) == 0


@pytest.mark.parametrize("kind", ["own", "mp", "shm"])
def test_registering_an_index_again_replaces_the_worker(kind):
    with rigs(kind) as make:
        rig = make()
        first, _ = rig.addresses()["pipes"]
        rig.sender.register_worker(1, first)
        assert rig.sender.worker_ids == [0, 1]


def test_newer_spelling(pipe):
    ours, theirs = (WeightSyncScheme.from_backend("process") for _ in range(2))
    net = Stamped(0)
    ours.init_on_sender("policy", pipes=[pipe[0]], model=Stamped(1))
    theirs.init_on_receiver("policy", pipe=pipe[1], model=net)
    for value, send in enumerate((ours.connect, lambda: ours.send(Stamped(2))), 1):
        sending = Call(send)
        while not theirs.receive(0.01):
            pass
        sending.result()
        assert ask(net) == value


def test_a_word_that_no_worker_answers_is_refused():
    with pytest.raises(RuntimeError, match="never 'loaded'"):
        RPCTransport().check_ack("loaded")
