"""Weights change by a send only, and a worker cannot damage them."""

import ctypes
import errno
import math
import mmap
import signal

import pytest
import torch

import shmsync
from support.jobs.engine import attach, detach, look, wait_version
from support.weights import Net, bytes_of, stamp, stamped
from support.worker import Gone


def read_digest(state):
    """The bytes of all leaves."""
    with state.sub.read() as section:
        return bytes_of(section.weights)


def fill_weights(state, value):
    state.sub.weights["large"].fill_(value)


def unprotect(state):
    """mprotect the pages to writable: (result, errno)."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = state.sub.weights["large"].data_ptr() // 4096 * 4096
    result = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    return result, errno.errorcode.get(ctypes.get_errno())


@pytest.fixture(scope="module")
def kept(keep):
    """Two workers for the tests in which no process dies."""
    return keep(2)


@pytest.fixture
def pair(kept):
    yield kept
    for worker in kept:
        if not worker.busy:
            worker.call(detach)


@pytest.mark.parametrize("slots", [1, 2])
def test_changes_of_the_trainer_show_up_with_the_next_publish_only(pair, slots):
    source = stamped(1)
    with shmsync.Publisher(source, slots=slots) as pub:
        for worker in pair:
            worker.call(attach, pub.handle)
        for v in range(2, 5):
            stamp(source, v)
            source["large"].data.fill_(v)  # past autograd's version counters
            assert pair[0].call(look) == pair[1].call(look) == (v - 1, v - 1, v - 1)
            assert pub.publish() == v
            assert pair[0].call(look) == pair[1].call(look) == (v, v, v)


def test_adopted_parameters_show_up_under_update_only(pair):
    net, x = Net(0), torch.randn(8, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with shmsync.Publisher(net) as pub:
        for worker in pair:
            worker.call(attach, pub.handle)
        identities = [id(p) for p in net.parameters()]
        pub.adopt(net, optimizer)
        assert [id(p) for p in net.parameters()] == identities
        reader = pair[0]
        seen = reader.call(read_digest)
        # Forward, backward and the buffers that forward writes leave the workers' weights alone.
        net(x).sum().backward()
        assert reader.call(read_digest) == seen
        # The optimizer's step is a version.
        optimizer.step()
        assert pub.version == 2
        stepped = reader.call(read_digest)
        assert stepped != seen
        assert stepped == bytes_of(pub.weights)
        # Writing under update(): no reader sees it before the end.
        with pub.update() as weights, torch.no_grad():
            net[0].weight.fill_(7)
            assert (weights["0", "weight"] == 7).all()
            for worker in pair:
                with pytest.raises(shmsync.WriterBusy):
                    worker.call(look, timeout=0.1)
            with pytest.raises(shmsync.PublishTimeout):
                reader.call(wait_version, 3, timeout=0.1)
            assert pub.version == 2
        for worker in pair:
            assert worker.call(wait_version, 3, timeout=math.inf) == 3
            assert worker.call(read_digest) == bytes_of(pub.weights) != stepped
        # Its own step inside update() is not another version.
        with pub.update():
            net.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            optimizer.step()
        assert pub.version == 4


@pytest.mark.host_memory(reason="a device's memory cannot be mapped read-only")
def test_worker_that_writes_into_its_weights_dies(attached, pair):
    with shmsync.Publisher(stamped(1), timeout=math.inf) as pub:
        vandal = attached(pub)
        for worker in pair:
            worker.call(attach, pub.handle)
        before = bytes_of(pub.weights)
        assert vandal.call(unprotect) == (-1, "EACCES")
        with pytest.raises(Gone) as caught:
            vandal.call(fill_weights, 666)
        assert caught.value.exitcode == -signal.SIGSEGV
        assert pair[0].call(read_digest) == pair[1].call(read_digest) == bytes_of(pub.weights) == before
        assert pub.publish(stamped(2)) == 2  # and it blocks no process
        assert pair[0].call(look) == (2, 2, 2)
