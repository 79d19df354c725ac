"""What is called of CUDA, over a proxy that minds CUDA's rules (support/devices/standin_cuda.py). No GPU is needed.

The last tests call the real bindings, where they are installed: without a driver each call answers with an error, but
takes its arguments as on a machine with one.
"""

import ctypes
import gc
import importlib.util
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shmsync
from shmsync import _native
from shmsync.errors import ArenaCorrupt, ArenaNotFound, DeviceFailed, ForkedHandle, NoSpace, ProtocolError, ShmSyncError
from shmsync.memory import devices
from shmsync.memory.cuda import causes, visible
from shmsync.memory.cuda.blocks import Blocks
from shmsync.memory.cuda.calls import RUNTIME, CudaCalls
from shmsync.memory.cuda.gpu import WHOLE_BLOCKS, Gpu, joined
from shmsync.memory.cuda.handle_format import SlabHandle, unpacked
from support.calls import Call
from support.devices.standin_cuda import BLOCK, GIVE_BACK, MEMORY, TALK, Code, Proxy, World, torch_event, torch_stream

needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-bindings are not installed: pip install 'shmsync[cuda]'",
)


def gpu(world=None, index=0, **options):
    calls = Proxy(world or World(), **options)
    return Gpu(index, calls, calls.side)


def two_processes():
    """The GPU of a world, as a trainer has it, and a worker."""
    world = World()
    return gpu(world), gpu(world)


def left(device):
    """What a process still has of CUDA when its garbage is gone."""
    gc.collect()
    return device._calls.left()


def tensor(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Memory.


def test_an_allocation_is_whole_blocks_and_shows_the_size_that_was_asked_for():
    device = gpu()
    storage = device.allocate(BLOCK + 5)
    assert storage.nbytes() == BLOCK + 5
    assert device._calls.names()[-1] == "cudaMalloc"
    assert device._calls.log[-2][1] == (2 * BLOCK,)
    assert WHOLE_BLOCKS == BLOCK


def test_two_processes_share_the_memory_and_nothing_else():
    trainer, worker = two_processes()
    with trainer._calls.side.on(0):
        trainer._calls.relax()
        trainer._calls.cudaMalloc(700)  # of another library; in a block that a small slab would share
    mine = trainer.allocate(1000)
    handle = trainer.export(mine)
    assert len(handle) == _native.HANDLE_BYTES
    theirs = worker.open(handle, 1000)
    tensor(mine).fill_(7)
    assert tensor(theirs).tolist() == [7] * 1000
    assert worker._calls.mappings.keys() == {theirs.data_ptr()}  # and nothing that lies before it
    (memory,) = worker._calls.mappings.values()
    assert memory.size == BLOCK


def test_a_process_opens_what_it_has_itself_without_cuda():
    device = gpu()
    mine = device.allocate(100)
    again = device.open(device.export(mine), 100)
    assert again.data_ptr() == mine.data_ptr()
    assert "cudaIpcOpenMemHandle" not in device._calls.names()
    del mine
    assert left(device) == {"memory": 1}  # the other one keeps it
    del again
    assert left(device) == {}


def test_memory_is_mapped_once_in_a_process_and_unmapped_with_the_last_tensor():
    trainer, worker = two_processes()
    mine = trainer.allocate(100)
    handle = trainer.export(mine)
    one, two = worker.open(handle, 100), worker.open(handle, 100)
    assert one.data_ptr() == two.data_ptr()
    view = tensor(one)[3:]
    worker.free(one)
    worker.free(two)
    del one, two
    assert left(worker) == {"mappings": 1}
    del view
    assert left(worker) == {}
    assert not worker._blocks._open
    assert worker.open(handle, 100).nbytes() == 100  # and anew


def test_memory_whose_last_user_is_collected_in_the_middle_of_the_next_opening_is_mapped_anew():
    closed, users = [], []
    blocks = Blocks(closed.append)

    class Found(dict):
        def get(self, key):
            found = super().get(key)
            users.clear()  # as a garbage collection may, between any two lines
            return found

    users.append(blocks.opened(b"handle", 10, lambda: 0x1000))
    blocks._open = Found(blocks._open)
    again = blocks.opened(b"handle", 10, lambda: 0x2000)
    assert closed == [0x1000] and again.address == 0x2000


def test_threads_that_open_and_let_go_always_find_the_memory():
    trainer, worker = two_processes()
    mine = trainer.allocate(64)
    tensor(mine).fill_(5)
    handle = trainer.export(mine)

    def use():
        for _ in range(200):
            assert tensor(worker.open(handle, 64)).tolist() == [5] * 64

    for call in [Call(use) for _ in range(4)]:
        call.result()
    assert left(worker) == {}


def test_too_much_memory_is_refused_before_anything_is_allocated():
    device = gpu()
    with pytest.raises(NoSpace) as caught:
        device.allocate(MEMORY + 1)
    text = str(caught.value)
    assert f"{MEMORY + WHOLE_BLOCKS:,} bytes are needed" in text
    assert f"{MEMORY:,} are free" in text
    assert "4,096 bytes unused" in text
    assert "cudaMalloc" not in device._calls.names()


def test_more_pinned_memory_than_the_host_has_is_refused(monkeypatch):
    monkeypatch.setattr("shmsync.memory.cuda.gpu.available_bytes", lambda: 999)
    device = gpu()
    with pytest.raises(NoSpace, match=r"1,000 bytes of the host's memory, and 999 are"):
        device.staging(1000)
    assert device._calls.left() == {}


def test_pinned_memory_goes_with_its_tensor():
    device = gpu()
    staging = device.staging(1000)
    view = staging[5:]
    del staging
    assert left(device) == {"host": 1}
    view.fill_(1)
    del view
    assert left(device) == {}


def test_a_torch_that_copies_instead_of_sharing_is_noticed():
    device = gpu()
    device._calls.side.copies = True
    with pytest.raises(DeviceFailed, match="instead of using it"):
        device.allocate(100)
    assert left(device) == {}


def changed(handle, **fields):
    return unpacked(handle)._replace(**fields).packed()


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda handle: b"\0" * 96, ArenaCorrupt, "begins with"),
        (lambda handle: handle[:50], ArenaCorrupt, "has 50 bytes"),
        (lambda handle: handle[:4] + b"\x09" + handle[5:], ArenaCorrupt, "version 9"),
        (lambda handle: changed(handle, size=77), ArenaCorrupt, "has 77 bytes, but its arena needs 100"),
        (lambda handle: changed(handle, uuid=b"x" * 16), ArenaCorrupt, "GPU-78787878-7878"),
        (
            lambda handle: changed(handle, memory=b"y" * 64),
            ArenaNotFound,
            "could not be opened.*its new arena",
        ),
    ],
)
def test_a_handle_that_is_not_right_is_refused(damage, error, words):
    trainer, worker = two_processes()
    mine = trainer.allocate(100)
    with pytest.raises(error, match=words):
        worker.open(damage(trainer.export(mine)), 100)
    assert left(worker) == {}


# Streams.


def test_follow_orders_by_an_event_of_the_streams_own_gpu():
    calls = Proxy(World(2), visible=(0, 1))
    first, second = Gpu(0, calls, calls.side), Gpu(1, calls, calls.side)
    mine, other = first.stream(), second.stream()
    seen, gate = [], threading.Event()
    calls.stream_of(other.handle).give(gate.wait)
    calls.stream_of(other.handle).give(lambda: seen.append("first"))
    first.follow(mine, other)
    calls.stream_of(mine.handle).give(lambda: seen.append("later"))
    assert not first.wait(mine, 0.02)
    gate.set()
    assert first.wait(mine, 20)
    assert seen == ["first", "later"]


def test_a_stream_does_not_follow_itself():
    device = gpu()
    stream = device.stream()
    before = len(device._calls.log)
    device.follow(stream, stream)
    assert len(device._calls.log) == before
    device.follow(stream, device.current())
    assert device._calls.names()[-1] == "cudaStreamWaitEvent"


def test_events_are_used_again():
    device = gpu()
    one, two = device.stream(), device.stream()
    for _ in range(20):
        device.follow(one, two)
    assert len(device._calls.events) == 1


def test_streams_and_events_of_torch_are_taken():
    device = gpu()
    mine, theirs = device.stream(), device.stream()
    assert device.as_stream(torch_stream(theirs.handle)) == theirs
    with device._event(theirs) as event:
        given = device.as_stream(torch_event(event))
        device.follow(mine, given)
    assert device._calls.log[-2] == ("cudaStreamWaitEvent", (mine.handle, event, 0))

    class OfAnotherLibrary:
        def __cuda_stream__(self):
            return 0, theirs.handle

    assert device.as_stream(OfAnotherLibrary()) == theirs
    with pytest.raises(TypeError, match="never been recorded"):
        device.as_stream(torch_event(0))
    with pytest.raises(TypeError, match="stream or an event of cuda:0 is needed"):
        device.as_stream(3)


def test_copies_that_lie_next_to_each_other_are_one():
    assert joined([(0, 100, 5), (5, 105, 5), (10, 200, 5), (20, 205, 5), (25, 0, 0)]) == [
        (0, 100, 10),
        (10, 200, 5),
        (20, 205, 5),
    ]


def fails(calls, name, code):
    """From now on this call fails."""

    def fail(*arguments):
        calls.log.append((name, arguments))
        calls.last_error = code
        return Code(code), None

    setattr(calls, name, fail)


def test_an_event_that_cannot_be_recorded_is_destroyed():
    device = gpu()
    one, two = device.stream(), device.stream()
    fails(device._calls, "cudaEventRecord", 999)
    for _ in range(3):
        with pytest.raises(DeviceFailed):
            device.follow(one, two)
    assert device._calls.events == {}


def test_the_default_stream_counts_as_captured_while_a_stream_that_it_would_wait_for_is():
    device = gpu()
    fails(device._calls, "cudaStreamIsCapturing", 906)
    assert device.capturing(device.current())
    assert device._calls.last_error == 0  # torch is not blamed for it


def test_torch_is_not_blamed_for_memory_that_cannot_be_given_back():
    device = gpu()
    storage = device.allocate(100)
    fails(device._calls, "cudaFree", 999)
    device.free(storage)
    del storage
    gc.collect()
    assert "cudaFree" in device._calls.names()
    assert device._calls.last_error == 0


def test_giving_back_leaves_the_thread_in_the_capture_mode_that_it_had():
    device = gpu()
    stream, storage, staging = device.stream(), device.allocate(100), device.staging(100)
    device.free(storage)
    device._calls.modes.relaxed = False
    del stream, storage, staging
    assert left(device) == {}
    assert not device._calls.modes.relaxed


@pytest.mark.parametrize("use", ["wait", "follow"])
def test_a_stream_that_is_captured_is_not_waited_for(use):
    device = gpu()
    mine, captured = device.stream(), device.stream()
    device._calls.capturing.add(captured.handle)
    with pytest.raises(ProtocolError, match="before or after the capture"):
        device.wait(captured, 1) if use == "wait" else device.follow(mine, captured)
    assert "cudaEventRecord" not in device._calls.names()


def test_wait_keeps_its_deadline():
    device = gpu()
    stream, gate = device.stream(), threading.Event()
    device._calls.stream_of(stream.handle).give(gate.wait)
    started = time.monotonic()
    assert not device.wait(stream, 0.05)
    assert time.monotonic() - started < 5
    gate.set()
    assert device.wait(stream, 20)


def test_an_error_that_comes_late_is_found_by_check():
    device = gpu()
    device.check()
    device._calls.fail_at, device._calls.code = len(device._calls.log), 700
    with pytest.raises(DeviceFailed, match="end it, and look for the kernel"):
        device.check()


# Which GPU.


@pytest.fixture
def process(monkeypatch):
    """process(world, visible) -> the calls of this process, from now on."""

    def become(world, visible_gpus=(0,)):
        calls = Proxy(world, visible_gpus)
        monkeypatch.setattr(visible, "system", lambda: (calls, calls.side))
        visible._used.cache_clear()
        return calls

    yield become
    visible._used.cache_clear()


def test_a_gpu_is_found_by_its_uuid_whatever_its_number(process):
    world = World(3)
    trainer = gpu(world, index=1, visible=(0, 2))
    mine = trainer.allocate(50)
    process(world, (1, 0, 2))
    found = visible.holder(trainer.export(mine), "weights")
    assert found.name == "cuda:2"
    assert found is visible.device(2)
    assert devices.of_kind(_native.SLAB_CUDA, "weights", trainer.export(mine)) is found
    tensor(mine).fill_(3)
    assert tensor(found.open(trainer.export(mine), 50)).tolist() == [3] * 50


def test_a_gpu_that_is_not_visible_is_named(process):
    world = World(2)
    trainer = gpu(world, visible=(1,))
    mine = trainer.allocate(50)
    process(world, (0,))
    with pytest.raises(ArenaNotFound, match=r"'weights' lies on GPU-0b0b.* sees GPU-0a0a.*CUDA_VISIBLE_DEVICES"):
        visible.holder(trainer.export(mine), "weights")
    with pytest.raises(DeviceFailed, match=r"cuda:1 is not there: this process sees 1 GPUs"):
        visible.device(1)
    with pytest.raises(ArenaCorrupt):
        visible.holder(b"\0" * 96, "weights")


def test_a_forked_child_finds_its_gpus_anew(process, monkeypatch):
    process(World())
    of_the_parent, generation = visible.device(0), _native.fork_generation()
    assert visible.device(0) is of_the_parent
    mine = Proxy(World())
    monkeypatch.setattr(visible, "_native", SimpleNamespace(fork_generation=lambda: generation + 1))
    monkeypatch.setattr(visible, "system", lambda: (mine, mine.side))
    assert visible.device(0)._calls is mine


def test_without_cuda_the_reason_is_said(monkeypatch):
    visible._used.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceFailed, match="was built without CUDA"):
        visible.device(0)
    assert "was built without CUDA" in visible.reason()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ForkedHandle, match="'spawn' or 'forkserver'"):
        visible.device(0)


def test_a_gpu_of_the_parent_is_refused_in_a_forked_child(monkeypatch):
    device = gpu()
    storage, stream = device.allocate(10), device.stream()
    before = len(device._calls.log)
    generation = _native.fork_generation()
    monkeypatch.setattr("shmsync.memory.cuda.gpu._native", SimpleNamespace(fork_generation=lambda: generation + 1))
    uses = [
        lambda: device.allocate(1),
        lambda: device.export(storage),
        lambda: device.open(SlabHandle(1, b"\x0a" * 16, b"?" * 64).packed(), 1),
        lambda: device.staging(1),
        device.stream,
        device.current,
        lambda: device.copy(stream, [(1, 2, 3)]),
        lambda: device.wait(stream, 0),
        lambda: device.capturing(stream),
        device.check,
    ]
    for use in uses:
        with pytest.raises(ForkedHandle):
            use()
    uses.clear()
    storage = stream = None  # the memory is the parent's
    gc.collect()
    assert len(device._calls.log) == before


# Errors: of each code, and at each call.


@pytest.mark.parametrize("code", [*causes._CURES, *causes._LOST, 2, 900, 901, 905, 906, 908, 777])
def test_each_code_has_a_cause_and_a_next_step(code):
    error = causes.CudaError("cudaX", code, "cudaErrorX", "words")
    for made in (causes.refused("copying", error, "cuda:0"), causes.not_opened(error, "cuda:0")):
        assert isinstance(made, ShmSyncError)
        assert f"({code}): words" in str(made)
        assert "cuda:0" in str(made)
        assert len(str(made).partition("words")[2]) > 15
    kind = {2: NoSpace}.get(code, ProtocolError if code in causes.CAPTURES else DeviceFailed)
    assert type(causes.refused("copying", error, "cuda:0")) is kind


def test_what_the_machine_is_is_said_with_the_error(monkeypatch):
    monkeypatch.setattr(causes, "_read", lambda path: "6.6.0-microsoft-standard-WSL2" if "osrelease" in path else "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    text = str(causes.refused("sharing", causes.CudaError("c", 801, "n", "w"), "cuda:0"))
    assert "this is WSL" in text
    assert "MIG instance" in text
    assert "WSL" not in str(causes.refused("sharing", causes.CudaError("c", 700, "n", "w"), "cuda:0"))


def scenario(world, calls):
    """Everything that a process does with a GPU; `calls` may fail at any of it."""
    device = Gpu(0, calls, calls.side)
    other = gpu(world)
    theirs = other.allocate(300)
    handle = other.export(theirs)
    mine = device.allocate(BLOCK)
    device.export(mine)
    opened = device.open(handle, 300)
    staging, stream, user = device.staging(100), device.stream(), device.stream()
    assert not device.capturing(user)
    device.follow(stream, user)
    device.copy(stream, [(mine.data_ptr(), staging.data_ptr(), 100), (mine.data_ptr() + 500, opened.data_ptr(), 9)])
    assert device.wait(stream, 20)
    device.check()


@pytest.fixture
def small_heap():
    """Garbage is looked for in what a test makes, and not in all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
def test_an_error_at_any_call_is_typed_and_leaks_nothing():
    calls = Proxy(world := World())
    scenario(world, calls)
    many = sum(name not in TALK for name, _ in calls.log)
    gc.collect()
    assert calls.left() in ({}, {"streams": 1})  # of check(), which goes with the device
    tried = set()
    for code in (1, 2, 35, 201, 205, 801, 999):
        for number in range(many):
            calls = Proxy(world := World(), fail_at=number, code=code)
            failed = None
            try:
                scenario(world, calls)
            except ShmSyncError as error:
                failed = type(error)
            gc.collect()
            after = [name for name, _ in calls.log if name not in TALK][number:]
            if not after:
                continue  # an event was asked for fewer times than the first time
            name = after[0]
            tried.add(name)
            if name in GIVE_BACK or (name == "relax" and GIVE_BACK & set(after[1:2])):
                continue  # there is nobody to tell
            assert failed is not None, f"{name} failed with {code}, and nobody said so"
            assert calls.last_error == 0, f"{name} leaves its error to torch"
            probe = max(0, calls.names().count("cudaStreamCreateWithFlags") - 2)  # of check(); the device keeps it
            assert calls.left()["streams"] <= probe, f"after {name} failed with {code}"
            assert calls.left().keys() <= {"streams"}, f"after {name} failed with {code}"
    assert {"cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaMemcpyAsync", "cudaEventRecord"} <= tried


# Under a whole arena.


@pytest.fixture
def arena(process):
    """arena(weights, ...) -> its calls, a publisher on the proxy, and a subscriber that finds it by its handle."""
    before, opened = list(devices._default), []

    def make(weights, slots=2, made=False, **options):
        calls = visible.device(0)._calls if made else process(World())
        device = visible.device(0)
        device.torch_device = torch.device("simulated", 0)  # for torch
        devices._default[:] = [device]
        pub = shmsync.Publisher(weights, slots=slots, timeout=20.0)
        opened.append(pub)
        sub = shmsync.Subscriber(pub.handle, worker=0, timeout=20.0, **options)
        opened.append(sub)
        return calls, pub, sub

    yield make
    devices._default[:] = before
    for each in reversed(opened):
        each.close()


def value(sub):
    with sub.read() as section:
        (only,) = set(section.weights["t"].tolist())
        return section.version, only


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_versions_go_through_the_calls(arena, slots):
    source = {"t": torch.full((1000,), 1.0)}
    calls, pub, sub = arena(source, slots)
    for version in range(2, 60):
        source["t"].fill_(version)
        assert pub.publish() == version
        source["t"].fill_(-1)  # copied aside
        sub.wait_version(version)
        assert value(sub) == (version, float(version))
    assert calls.names().count("cuLaunchHostFunc") >= 2 * 58  # a commit and a release for each


@pytest.mark.parametrize("slots", [1, 2])
def test_weights_of_the_gpu_are_copied_after_the_current_stream_and_before_what_comes_next(process, arena, slots):
    process(World())
    device = visible.device(0)
    there = torch.empty(0, device="simulated:0").set_(device.allocate(4000), 0, (1000,)).fill_(1)
    calls, pub, sub = arena({"t": there}, slots, made=True)
    stream = device.stream()
    with calls.side.stream(stream.handle):
        for version in range(2, 30):
            for step in (-1, version):
                calls.kernel(lambda step=step: there.fill_(step))
            pub.publish({"t": there})
            calls.kernel(lambda: there.fill_(-2))
            sub.wait_version(version)
            assert value(sub) == (version, float(version))
    assert "cudaHostAlloc" not in calls.names()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_publish_during_a_capture_is_refused_before_anything_changes(arena, slots):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, slots)
    while not sub._reader.arena.on_device.reads.wait(10**8):
        pass
    stream = visible.device(0).stream()
    calls.capturing.add(stream.handle)
    source["t"].fill_(2)
    before = calls.names().count("cudaMemcpyAsync")
    with calls.side.stream(stream.handle):
        with pytest.raises(ProtocolError, match="before or after the capture"):
            pub.publish()
        with pytest.raises(ProtocolError, match="before or after the capture"), pub.update():
            pass
    with pytest.raises(ProtocolError, match="before or after the capture"):
        pub.publish(after=torch_stream(stream.handle))
    assert calls.names().count("cudaMemcpyAsync") == before
    assert value(sub) == (1, 1.0)
    assert pub.publish(wait=[]) == 2
    assert value(sub) == (2, 2.0)


def test_a_slot_is_kept_until_the_kernels_of_its_section_are_done(arena):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, 1)
    kernels, seen, gate = visible.device(0).stream(), [], threading.Event()
    calls.stream_of(kernels.handle).give(gate.wait)
    with sub.read() as section:
        weights = section.weights["t"]
        calls.kernel(lambda: seen.append(set(weights.tolist())), kernels.handle)
        section.release_after(torch_stream(kernels.handle))
    source["t"].fill_(2)
    with pytest.raises(shmsync.ReaderStalled):
        pub.publish(timeout=0.2)
    gate.set()
    assert pub.publish(wait=[]) == 2
    assert seen == [{1.0}]


def test_a_section_around_a_capture_holds_nothing_up(arena):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, 1)
    stream = visible.device(0).stream()
    calls.capturing.add(stream.handle)
    with calls.side.stream(stream.handle), sub.read() as section:
        section.release_after(torch_stream(stream.handle))
    source["t"].fill_(2)
    assert pub.publish(wait=[], timeout=20) == 2


def test_a_capture_in_a_section_of_several_slots_is_refused(arena):
    source = {"t": torch.full((100,), 1.0)}
    calls, pub, sub = arena(source, 2)
    stream = visible.device(0).stream()
    calls.capturing.add(stream.handle)
    with calls.side.stream(stream.handle), pytest.raises(ProtocolError, match="publish with slots=1"), sub.read():
        pass
    for version in (2, 3, 4):  # and the slot was let go
        source["t"].fill_(version)
        assert pub.publish(wait=[], timeout=20) == version
        assert value(sub) == (version, float(version))


def test_nothing_is_left_when_both_ends_are_closed(arena):
    calls, pub, sub = arena({"t": torch.full((100,), 1.0)}, 2)
    pub.publish(wait=[])
    value(sub)
    sub.close()
    pub.close()
    gc.collect()
    visible._used.cache_clear()
    devices._default.clear()
    gc.collect()
    assert {name: many for name, many in calls.left().items() if name in ("memory", "mappings")} == {}


def test_an_arena_whose_device_refuses_any_call_leaves_no_segment(process):
    """At the creation and the first publish: a typed error, no memory of the GPU, no segment (see nothing_left)."""
    before = list(devices._default)
    try:
        number = 0
        while True:
            calls = process(World())
            device = visible.device(0)
            device.torch_device = torch.device("simulated", 0)
            devices._default[:] = [device]
            calls.fail_at = sum(name not in TALK for name, _ in calls.log) + number
            calls.code = 801
            number += 1
            pub = None
            try:
                pub = shmsync.Publisher({"t": torch.ones(10)}, timeout=20.0)
            except ShmSyncError:
                pass
            if pub is None:
                gc.collect()
                assert calls.left().get("memory", 0) == 0, calls.names()
                continue
            reached = sum(name not in TALK for name, _ in calls.log) <= calls.fail_at
            calls.fail_at = None
            pub.close()
            if reached:
                break
        assert number > 15
    finally:
        devices._default[:] = before


# The real bindings, and the driver.


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A library with the driver's one function that is called directly. Calls to it hold the GIL."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parents[2] / "support" / "devices" / "libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    return ctypes.PyDLL(str(library))


def test_a_version_is_committed_by_a_thread_of_the_driver_without_the_gil(driver):
    runtime = SimpleNamespace(
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeRelaxed=2), cudaError_t={0: 0, 400: 400}.__getitem__
    )
    calls = CudaCalls(runtime, driver)
    with shmsync.Publisher({"t": torch.ones(1)}, slots=2) as pub:
        writer = pub._writer.side.writer
        assert writer.begin()
        call = writer.commit_later()
        assert int(calls.cuLaunchHostFunc(1, type(call).function, call.ticket())[0]) == 0
        assert call.wait(0)
        assert pub.version == 2
    assert int(calls.cuLaunchHostFunc(0, 1, 1)[0]) == 400


_ARGUMENTS = {
    "cudaGetDeviceProperties": (0,),
    "cudaMemGetInfo": (),
    "cudaMalloc": (BLOCK,),
    "cudaFree": (4096,),
    "cudaHostAlloc": (4096, 1),
    "cudaFreeHost": (4096,),
    "cudaStreamCreateWithFlags": (1,),
    "cudaStreamDestroy": (4096,),
    "cudaStreamQuery": (4096,),
    "cudaStreamIsCapturing": (4096,),
    "cudaEventCreateWithFlags": (2,),
    "cudaEventDestroy": (4096,),
    "cudaEventRecord": (4096, 4096),
    "cudaEventQuery": (4096,),
    "cudaStreamWaitEvent": (4096, 4096, 0),
    "cudaIpcCloseMemHandle": (4096,),
    "cudaGetLastError": (),
    "cudaIpcGetMemHandle": (4096,),
    "cudaIpcOpenMemHandle": (b"h" * 64,),
    "cudaMemcpyAsync": (4096, 8192, 10, 4096),
    "relax": (),
}


@pytest.fixture
def bindings():
    from cuda.bindings import runtime

    return CudaCalls(runtime, SimpleNamespace(cuLaunchHostFunc=SimpleNamespace()))


@needs_bindings
@pytest.mark.skipif(torch.version.cuda is not None, reason="on a machine with a GPU these addresses would be used")
@pytest.mark.parametrize("name", _ARGUMENTS)
def test_the_bindings_take_the_arguments_and_answer_in_the_same_form(bindings, name):
    answer = getattr(bindings, name)(*_ARGUMENTS[name])
    code = answer[0]
    assert int(code) != 0 or name == "cudaGetLastError"  # there is no driver
    assert bindings.cudaGetErrorString(code)[1].decode()
    standin = Proxy(World())
    with standin.side.on(0):
        standin.fail_at = 1
        standin.modes.relaxed = True
        standin.log.append(("first", ()))
        assert len(getattr(standin, name)(*_ARGUMENTS[name])) == len(answer)


@needs_bindings
def test_all_calls_are_tried_and_the_numbers_are_those_of_cuda(bindings):
    from cuda.bindings import runtime

    from shmsync.memory.cuda import calls

    mine = {*RUNTIME, *(name for name in vars(CudaCalls) if not name.startswith("_"))}
    assert mine - set(_ARGUMENTS) == {"cudaGetErrorString", "cuLaunchHostFunc", "restore"}
    assert runtime.cudaStreamNonBlocking == calls.STREAM_NON_BLOCKING
    assert runtime.cudaEventDisableTiming == calls.EVENT_NO_TIMING
    assert runtime.cudaHostAllocPortable == calls.HOST_PORTABLE
    assert runtime.cudaIpcMemLazyEnablePeerAccess == calls.IPC_LAZY_PEER_ACCESS
    codes = {int(code) for code in runtime.cudaError_t.__members__.values()}
    assert codes >= {*causes._CURES, *causes._LOST, causes.OUT_OF_MEMORY, causes.NOT_READY, causes.CAPTURE_ELSEWHERE}
    assert runtime.cudaError_t.cudaErrorStreamCaptureUnsupported == causes.CAPTURES[0]
    assert runtime.cudaError_t.cudaErrorStreamCaptureWrongThread == causes.CAPTURES[-1]
