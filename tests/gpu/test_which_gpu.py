"""GPUs are found by their UUIDs, and weights cross from one to another."""

import pytest
import torch

import shmsync
from support.devices import on_gpu
from support.weights import stamp

pytestmark = pytest.mark.two_gpus


def test_a_worker_may_see_the_gpus_in_another_order(start):
    with shmsync.Publisher(on_gpu.weights(1, "cuda:1"), slots=2, device="cuda:1", timeout=30.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.only_device, "1,0")
        assert worker.call(on_gpu.attach, pub.handle) == 0
        assert worker.call(on_gpu.read) == (1, [1.0])


def test_a_worker_that_does_not_see_the_gpu_is_told(start):
    with shmsync.Publisher(on_gpu.weights(1, "cuda:1"), slots=2, device="cuda:1", timeout=30.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.only_device, "0")
        with pytest.raises(shmsync.ArenaNotFound, match="CUDA_VISIBLE_DEVICES"):
            worker.call(on_gpu.attach, pub.handle)


def test_a_trainer_on_one_gpu_publishes_on_another(start):
    source = on_gpu.weights(1, "cuda:0")
    with shmsync.Publisher(source, slots=2, device="cuda:1", timeout=30.0) as pub:
        (worker,) = start(1)
        assert worker.call(on_gpu.attach, pub.handle) == 1
        for version in range(2, 10):
            stamp(source, version)
            pub.publish(wait=[])
            assert worker.call(on_gpu.read_on, version) == (version, [float(version)])


def test_streams_of_two_gpus_end_a_section():
    source = on_gpu.weights(1, "cuda:0")
    other = torch.cuda.Stream(device="cuda:1")
    with (
        shmsync.Publisher(source, slots=1, device="cuda:0", timeout=30.0) as pub,
        shmsync.Subscriber(pub.handle, worker=0, timeout=30.0) as sub,
    ):
        with sub.read() as section:
            with torch.cuda.device(1), torch.cuda.stream(other):
                torch.cuda._sleep(200_000_000)
                copied = section.weights["a"].to("cuda:1", non_blocking=True)
            section.release_after(other)
        source["a"].fill_(2)
        pub.publish(wait=[])
        other.synchronize()
        assert set(copied.tolist()) == {1.0}
