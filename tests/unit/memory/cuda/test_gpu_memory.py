"""Memory of a GPU by CUDA's calls, over a proxy that minds CUDA's rules (support/devices/standin_cuda.py)."""

import pytest

from shmsync import _native
from shmsync.errors import ArenaNotFound, DeviceFailed, NoSpace
from shmsync.memory.cuda.gpu import WHOLE_BLOCKS
from support.devices.standin_cuda import BLOCK, MEMORY, gpu, left, two_processes
from support.devices.standin_torch import tensor


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
    del one, two
    assert left(worker) == {"mappings": 1}
    del view
    assert left(worker) == {}
    assert worker.open(handle, 100).nbytes() == 100  # and mapped again


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
    monkeypatch.setattr("shmsync.memory.slab.available_bytes", lambda: 999)
    device = gpu()
    with pytest.raises(NoSpace, match=r"copies from the host to cuda:0 need 1,000 bytes but 999 are"):
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


def test_memory_that_is_gone_is_not_opened():
    trainer, worker = two_processes()
    mine = trainer.allocate(100)
    handle = trainer.export(mine)
    del mine
    with pytest.raises(ArenaNotFound, match="could not be opened.*its new arena"):
        worker.open(handle, 100)
    assert left(worker) == {}
