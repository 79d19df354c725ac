"""Which GPU is meant, and what is said about each error of CUDA's calls; at each call, over the proxy."""

import gc
from types import SimpleNamespace

import pytest
import torch

from shmsync import _native
from shmsync.errors import ArenaNotFound, DeviceFailed, ForkedHandle, ShmSyncError
from shmsync.memory import devices
from shmsync.memory.cuda import visible
from shmsync.memory.cuda.gpu import Gpu
from support.devices.standin_cuda import BLOCK, GIVE_BACK, TALK, Proxy, World, gpu
from support.devices.standin_torch import tensor


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
    for _ in range(2):  # a publisher's first look at weights on the parent's GPU is no reason to forget about it
        with pytest.raises(ForkedHandle):
            devices.holding(SimpleNamespace(device=torch.device("cuda", 0)))


def test_a_gpu_of_the_parent_is_refused_in_a_forked_child(monkeypatch):
    device = gpu()
    storage, stream = device.allocate(10), device.stream()
    before = len(device._calls.log)
    generation = _native.fork_generation()
    monkeypatch.setattr("shmsync.memory.cuda.gpu._native", SimpleNamespace(fork_generation=lambda: generation + 1))
    uses = [
        lambda: device.allocate(1),
        lambda: device.export(storage),
        lambda: device.open(b"\x0a" * 16 + b"?" * 64, 1),
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


def test_an_error_at_any_call_is_typed_and_leaks_nothing():
    calls = Proxy(world := World())
    scenario(world, calls)
    many = sum(name not in TALK for name, _ in calls.log)
    gc.collect()
    gc.freeze()  # else each collection here walks all of torch
    assert calls.left() in ({}, {"streams": 1})  # of check(), which goes with the device
    tried = set()
    for code in (2, 999):  # no memory, no known cause
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
                continue  # no caller is left to tell
            assert failed is not None, f"{name} failed with {code}, and no error was raised"
            assert calls.last_error == 0, f"{name} leaves its error to torch"
            probe = max(0, calls.names().count("cudaStreamCreateWithFlags") - 2)  # of check(); the device keeps it
            assert calls.left()["streams"] <= probe, f"after {name} failed with {code}"
            assert calls.left().keys() <= {"streams"}, f"after {name} failed with {code}"
    assert {"cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaMemcpyAsync", "cudaEventRecord"} <= tried
