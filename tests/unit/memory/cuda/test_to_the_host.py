"""Weights on a GPU, and an arena in the host's memory that CUDA has registered: both ways, over the proxy."""

import threading

import pytest
import torch

import shmsync
from shmsync.cli import doctor
from shmsync.engine.converting import ALONE, MANY
from shmsync.errors import ShmSyncError
from shmsync.memory import devices
from shmsync.memory.cuda import visible
from support.calls import Call
from support.devices.standin_cuda import TALK, Proxy, World
from support.jobs.engine import attach, bind_copies, look, read
from support.weights import stamp


def name_simulated(patch):
    """For torch the proxy's GPU is simulated:0."""
    gpu = visible.device(0)
    gpu.torch_device = torch.device("simulated", 0)
    patch.setitem(devices._of_torch, gpu.torch_device, gpu)


@pytest.fixture
def there(process, monkeypatch):
    """there(tensor) -> a copy on the proxy's GPU, whose calls are there.calls; torch calls it simulated:0."""
    calls = process(World())
    name_simulated(monkeypatch)

    def put(tensor):
        with torch.no_grad():
            return tensor.to("simulated:0")

    put.calls = calls
    yield put
    calls.fail_at = calls.failed = None


def model(there, value=1.0, many=0):
    weights = {"large": torch.full((ALONE // 4,), value), "small": torch.full((10,), value)}
    weights |= {f"w{number}": torch.full((20,), value) for number in range(many)}
    return {key: there(tensor) for key, tensor in weights.items()}


def seen(sub):
    with sub.read() as section:
        return section.version, {value for tensor in section.weights.values() for value in tensor.tolist()}


@pytest.mark.parametrize("many", [0, MANY])
@pytest.mark.parametrize("slots", [1, 2])
def test_versions_cross_by_the_calls_that_are_needed_and_nothing_is_left(there, slots, many):
    calls, source = there.calls, model(there, many=many)
    stream = visible.device(0).stream()
    with (
        calls.side.stream(stream.cuda_stream),
        shmsync.Publisher(source, slots=slots, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
    ):
        ((_, flags),) = calls.registered.values()
        assert flags == 1  # the publisher's mapping, which is writable
        for version in range(2, 9):
            calls.kernel(lambda version=version: [tensor.fill_(version) for tensor in source.values()] and None)
            before = len(calls.names())
            pub.publish()
            names = calls.names()[before:]
            if many and version > 4:
                assert calls.side.launches == version - 1
                assert "cudaMemcpyAsync" not in names
            elif not many:
                assert names.count("cudaMemcpyAsync") == 2
            assert names.count("cuLaunchHostFunc") == 1
            calls.kernel(lambda: [tensor.fill_(-1) for tensor in source.values()] and None)
            sub.wait_version(version)
            assert seen(sub) == (version, {float(version)})
    assert calls.registered == {}
    assert calls.last_error == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_a_refused_capture_leaves_the_copies_as_they_are(there, slots):
    source, there.calls.side.refuses_captures = model(there, many=MANY), True
    with (
        shmsync.Publisher(source, slots=slots, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
    ):
        for version in range(2, 6):
            for tensor in source.values():
                tensor.fill_(version)
            pub.publish(wait=[])
            assert seen(sub) == (version, {float(version)})
    assert there.calls.side.launches == 0


@pytest.mark.parametrize("many", [0, MANY])
@pytest.mark.parametrize("slots", [1, 2])
def test_any_call_of_a_publish_may_fail_and_no_half_version_is_seen(there, slots, many):
    calls, source = there.calls, model(there, many=many)

    def publish(pub, number):
        for tensor in source.values():
            tensor.fill_(number)
        pub.publish(wait=[])

    def asked():
        return sum(name not in TALK for name, _ in calls.log)

    with (
        shmsync.Publisher(source, slots=slots, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
    ):
        begin = asked()
        publish(pub, 1)
        tried = set()
        for number in range(asked() - begin):
            calls.fail_at = asked() + number
            try:
                publish(pub, 2)
            except ShmSyncError:
                tried.add([name for name, _ in calls.log if name not in TALK][calls.fail_at])
                calls.fail_at = None
                if slots == 2:
                    assert seen(sub)[1] in ({1.0}, {2.0})
            else:
                calls.fail_at = None
                assert seen(sub)[1] == {2.0}
            publish(pub, 1)
            assert seen(sub) == (pub.version, {1.0})
        copies = set() if many else {"cudaMemcpyAsync"}  # of many the record is given up, and they are asked for
        assert tried >= {"cudaEventRecord", "cudaStreamWaitEvent", "cuLaunchHostFunc"} | copies
        assert calls.last_error == 0


def publish_half(state):
    """Publish 2; the GPU stands still when half of the first leaf is written, until state.gate is set."""
    reached, state.gate = threading.Event(), threading.Event()
    stamp(state.source, 2)
    state.calls.behind_half = lambda: reached.set() or state.gate.wait()
    state.pub.publish()
    assert reached.wait(20)
    with pytest.raises(shmsync.DeviceBusy, match="still being copied"):
        state.pub.publish(timeout=0.1)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
def test_close_waits_for_a_copy_under_way_or_leaves_its_memory(there, monkeypatch, slots, in_time):
    there.source = model(there)
    monkeypatch.setattr(devices, "_LAST_COPIES", 0.05)
    with shmsync.Publisher(there.source, slots=slots, timeout=20.0) as there.pub:
        sub = shmsync.Subscriber(there.pub.handle, timeout=20.0)
        publish_half(there)
        there.pub._writer.timeout = 20.0 if in_time else 0.1
        closing = Call(there.pub.close)
        closing.join(0.2 if in_time else None)
        assert closing.is_alive() == in_time
        assert there.calls.registered  # the GPU still writes there
        there.gate.set()
        closing.result()
    there.calls._synchronize()
    with sub:
        if in_time:
            assert read(sub) == (2, 2, 2)
            assert there.calls.registered == {}
        elif slots == 2:
            assert read(sub) == (1, 1, 1)
        else:
            with pytest.raises(shmsync.Poisoned):
                read(sub)


def open_trainer_there(state, slots):
    calls = state.calls = Proxy(World())
    visible.system = lambda: (calls, calls.side)
    name_simulated(pytest.MonkeyPatch())
    state.source = model(lambda tensor: tensor.to("simulated:0"))
    state.pub = shmsync.Publisher(state.source, slots=slots, timeout=20.0)
    return state.pub.handle


@pytest.mark.parametrize("slots", [1, 2])
def test_a_trainer_that_is_killed_in_a_copy_leaves_no_half_version(start, slots):
    trainer, reader = start(2)
    reader.call(attach, trainer.call(open_trainer_there, slots), timeout=20.0)
    trainer.call(publish_half)
    for error in (shmsync.WriterBusy, shmsync.Poisoned):
        if error is shmsync.Poisoned:
            trainer.kill()
        if slots == 2:
            assert reader.call(look) == (1, 1, 1)
        else:
            with pytest.raises(error):
                reader.call(look, timeout=0.2 if error is shmsync.WriterBusy else None)


@pytest.mark.parametrize("refused", [(), ("cudaHostRegister",)])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_worker_on_a_gpu_fetches_from_memory_that_it_has_registered_for_reading(there, monkeypatch, slots, refused):
    calls = there.calls
    for name in refused:
        monkeypatch.setattr(calls, name, lambda *arguments: (calls._wrong(801),))

    def net():
        return torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))

    module, worker = net(), net()
    worker.to("simulated:0")
    with (
        shmsync.Publisher(module, slots=slots, timeout=20.0) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as sub,
    ):
        bind_copies(sub, worker, guard=False)
        changes = worker[0].weight._version
        for version in range(2, 6):
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    tensor.fill_(version)
            pub.publish()
            assert sub.refresh()
            assert {value for tensor in worker.state_dict().values() for value in tensor.flatten().tolist()} == {
                version
            }
        assert worker[0].weight._version > changes
        assert [flags for _, flags in calls.registered.values()] == ([] if refused else [9])  # read-only
    assert calls.registered == {}
    assert calls.last_error == 0


@pytest.mark.parametrize(
    ("refused", "level", "words"),
    [(None, "ok", "can lie on"), (1, "note", "a publisher copies at the speed"), (9, "note", "a worker copies at the")],
)
def test_doctor_says_whether_memory_can_be_registered(there, monkeypatch, tmp_path, refused, level, words):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    register = there.calls.cudaHostRegister

    def registered(address, size, flags):
        return (there.calls._wrong(801),) if flags == refused else register(address, size, flags)

    monkeypatch.setattr(there.calls, "cudaHostRegister", registered)
    found = doctor.cuda(tmp_path)
    assert (found.level.value, found.check) == (level, "cuda")
    assert words in found.text
    assert there.calls.registered == {}
