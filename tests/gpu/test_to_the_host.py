"""A trainer on a GPU and an arena in the host's memory, which CUDA registers; and the way back."""

import pytest
import torch

import shmsync
from shmsync.engine.converting import MANY
from support.devices import on_gpu
from support.jobs.engine import bind_copies
from support.weights import stamp

SLOTS = [1, 2]


def model(value, device):
    return on_gpu.weights(value, device) | {
        f"w{n}": torch.full((50,), float(value), device=device) for n in range(MANY)
    }


@pytest.mark.parametrize("slots", SLOTS)
def test_publish_does_not_stop_the_trainer_and_each_version_is_whole(start, device, hold, slots):
    source = model(1, device)
    with shmsync.Publisher(source, slots=slots, timeout=30.0) as pub:
        assert pub._writer.arena.pinned_slab is not None
        (worker,) = start(1)
        worker.call(on_gpu.attach_on_host, pub.handle)
        for version in range(2, 12):  # the later ones by a recorded graph
            hold(cycles=600_000_000)
            stamp(source, version)
            pub.publish()
            assert pub.version == version - 1  # it came back while the stream was busy
            stamp(source, -1)  # the next step; comes after the copy
            assert worker.call(on_gpu.read_on, version) == (version, [float(version)])
        recorded = pub._writer.plans._plans[0].conversions._recorded
        assert len(recorded) == slots and None not in recorded.values()


@pytest.mark.parametrize("slots", SLOTS)
def test_a_worker_on_the_gpu_fetches_from_registered_memory(device, slots):
    trainer, worker = (torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.BatchNorm1d(900)) for _ in range(2))
    worker.to(device)
    with (
        shmsync.Publisher(trainer, slots=slots, timeout=30.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=30.0) as sub,
    ):
        bind_copies(sub, worker, guard=False)
        for version in range(2, 8):
            stamp(trainer.state_dict(), version)
            pub.publish()
            sub.refresh()
            found = {value for tensor in worker.state_dict().values() for value in tensor.unique().tolist()}
            assert found == {version}
        assert sub._reader.arena.pinned_slab is not None
