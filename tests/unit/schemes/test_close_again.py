"""A scheme's end that is busy when it is closed: the others are closed, and the next close() ends it."""

import multiprocessing

import pytest
import torch

import shmsync
from shmsync.engine.publisher import writer_of
from shmsync.schemes import SharedMemWeightSyncScheme
from shmsync.schemes.arenas.subscriptions import Subscriptions
from support.calls import elsewhere
from support.processes import segments

WEIGHTS = {"t": torch.zeros(4)}


@pytest.mark.parametrize("busy", [0, 1])
def test_a_shutdown_beside_a_write_is_finished_by_the_next(busy):
    with_worker = [multiprocessing.Pipe() for _ in range(2)]
    scheme = SharedMemWeightSyncScheme(groups=[[0], [1]], timeout=0.05)
    scheme.init_on_sender("policy", pipes=[ours for ours, _ in with_worker])
    sender = scheme.get_sender()
    sender.send_async(WEIGHTS)
    assert len(segments()) == 2
    writer = writer_of(sender.carrier.publishers.publisher("policy", busy))
    with elsewhere(writer.side.lock):
        with pytest.raises(shmsync.WriterBusy):
            scheme.shutdown()
        assert len(segments()) == 1
        with pytest.raises(shmsync.ClosedError):
            sender.send(WEIGHTS)
    scheme.shutdown()
    assert segments() == []
    scheme.shutdown()
    for pipe in with_worker:
        for end in pipe:
            end.close()


def test_a_worker_that_leaves_when_there_is_no_arena_has_used_nothing():
    ours, theirs = multiprocessing.Pipe()
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=[ours])
    sender = scheme.get_sender()
    assert not sender.carrier.done_before_leaving("policy", 0)
    sender.send_async(WEIGHTS)
    assert not sender.carrier.done_before_leaving("policy", 0)
    scheme.shutdown()
    assert not sender.carrier.done_before_leaving("policy", 0)
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize("busy", ["first", "second"])
def test_a_receiver_that_is_closed_beside_a_section_is_closed_by_the_next(busy):
    with shmsync.Publisher(WEIGHTS) as first, shmsync.Publisher(WEIGHTS) as second:
        subscriptions = Subscriptions(consistency="pinned", timeout=0.05)
        publishers = {"first": first, "second": second}
        for model_id, pub in publishers.items():
            subscriptions.join(model_id, pub.handle, 0)
        with elsewhere(subscriptions.needed(busy).read()):
            with pytest.raises(shmsync.WriterBusy):
                subscriptions.close()
            assert {model_id for model_id, pub in publishers.items() if pub.readers()} == {busy}
        subscriptions.close()
        assert not first.readers() + second.readers()
