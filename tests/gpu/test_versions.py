"""An arena on a GPU between processes: whole versions, the order of streams, sections and their kernels."""

import pytest
import torch

import shmsync
from support.devices import on_gpu
from support.weights import stamp

SLOTS = [1, 2, 3]


@pytest.mark.parametrize("slots", SLOTS)
def test_workers_see_whole_versions_without_a_copy(start, device, slots):
    source = on_gpu.weights(1)
    with shmsync.Publisher(source, slots=slots, device=device, timeout=30.0) as pub:
        workers = start(2)
        for index, worker in enumerate(workers):
            worker.call(on_gpu.attach, pub.handle, index)
        for version in range(2, 30):
            stamp(source, version)
            pub.publish()
            for worker in workers:
                assert worker.call(on_gpu.read_on, version) == (version, [float(version)])
        before = on_gpu.used(None)
        for worker in workers:
            worker.call(on_gpu.close)
        assert before - on_gpu.used(None) < 4 * on_gpu.WORDS  # they had no copy of their own


@pytest.mark.parametrize("slots", SLOTS)
def test_publish_does_not_stop_the_trainer_and_is_seen_when_it_is_done(start, device, hold, slots):
    source = on_gpu.weights(1)
    with shmsync.Publisher(source, slots=slots, device=device, timeout=30.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.attach, pub.handle)
        hold()
        stamp(source, 2)
        done = torch.cuda.Event()
        pub.publish()
        done.record()
        assert not done.query()  # it came back while the stream was busy
        assert pub.version == 1
        stamp(source, -1)  # the next step; comes after the copy
        assert worker.call(on_gpu.read_on, 2) == (2, [2.0])


def test_after_orders_what_another_stream_gathers(start, device, hold):
    source, gathering = on_gpu.weights(1), torch.cuda.Stream()
    with shmsync.Publisher(source, slots=2, device=device, timeout=30.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.attach, pub.handle)
        for version in range(2, 12):
            hold(gathering, 20_000_000)
            with torch.cuda.stream(gathering):
                stamp(source, version)
            pub.publish(after=gathering if version % 2 else gathering.record_event(), wait=[])
            gathering.wait_stream(torch.cuda.current_stream())
            assert worker.call(on_gpu.read_on, version) == (version, [float(version)])


@pytest.mark.parametrize("slots", SLOTS)
def test_a_slot_is_kept_until_the_kernels_of_its_sections_are_done(device, hold, slots):
    source = on_gpu.weights(1)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with (
        shmsync.Publisher(source, slots=slots, device=device, timeout=30.0) as pub,
        shmsync.Subscriber(pub.handle, worker=0, timeout=30.0) as sub,
    ):
        with torch.cuda.stream(stream), sub.read() as section:
            hold(other)
            with torch.cuda.stream(other):
                found = on_gpu.seen(section)
            section.release_after(other)
        for version in range(2, slots + 2):
            stamp(source, version)
            pub.publish(wait=[])
        other.synchronize()  # with three slots no publish has waited for the section's
        assert set(found.tolist()) == {1.0}


@pytest.mark.parametrize("publishes", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slots", [1, 3])
def test_no_torn_read_under_load(start, device, slots, publishes):
    source = on_gpu.weights(1, words=1 << 14)
    with shmsync.Publisher(source, slots=slots, device=device, timeout=60.0) as pub:
        workers = start(4)
        for index, worker in enumerate(workers):
            worker.call(on_gpu.attach, pub.handle, index)
            worker.start(on_gpu.storm, publishes)
        for version in range(2, publishes + 1):
            stamp(source, version)
            pub.publish()
        for worker in workers:
            sections, wrong = worker.result()
            assert sections > 0
            assert wrong == []


@pytest.mark.parametrize(("trainer", "arena"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_trainer_and_arena_on_different_devices(start, trainer, arena):
    source = on_gpu.weights(1, trainer)
    with shmsync.Publisher(source, slots=2, device=arena, timeout=30.0) as pub:
        (worker,) = start(1)
        worker.call(on_gpu.attach, pub.handle)
        for version in range(2, 8):
            stamp(source, version)
            pub.publish(wait=[])
            assert worker.call(on_gpu.read_on, version) == (version, [float(version)])
