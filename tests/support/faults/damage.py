"""Ways in which a worker could damage the weights."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import torch

from support.holdings import slab_fds


def fill_weights(state):
    state.sub.weights["large"].fill_(666)


def write_bound_parameter(state):
    with torch.no_grad():
        next(state.module.parameters()).add_(1)


def unprotect(state):
    """mprotect the pages to writable: (result, errno)."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = state.sub.weights["large"].data_ptr() // 4096 * 4096
    result = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    return result, errno.errorcode.get(ctypes.get_errno())


def break_in(state, publisher):
    """Try every way to a writable slab of this pid's, or to a shorter one. What each came to: an errno, or "done"."""
    libc = ctypes.CDLL(None, use_errno=True)
    results = {}

    def attempt(what, function):
        try:
            function()
        except OSError as error:
            results[what] = errno.errorcode.get(error.errno, str(error.errno))
        else:
            results[what] = "done"

    def punch(fd):
        if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)) != 0:  # PUNCH_HOLE | KEEP_SIZE
            raise OSError(ctypes.get_errno(), "fallocate")

    def through_mem():
        fd = os.open("/proc/self/mem", os.O_RDWR)
        try:
            os.pwrite(fd, b"\xff" * 8, state.sub.weights["large"].data_ptr())
        finally:
            os.close(fd)

    for number in slab_fds(publisher):
        path = f"/proc/{publisher}/fd/{number}"
        size = os.stat(path).st_size
        fd = os.open(path, os.O_RDONLY)
        attempt("map what it may read", lambda: mmap.mmap(fd, size))  # noqa: B023
        os.close(fd)
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            results["open it writable"] = errno.errorcode[error.errno]
            continue
        attempt("map it again", lambda: mmap.mmap(fd, size))  # noqa: B023
        attempt("write to it", lambda: os.pwrite(fd, b"\xff" * 8, 0))  # noqa: B023
        attempt("truncate it", lambda: os.ftruncate(fd, 4096))  # noqa: B023
        attempt("grow it", lambda: os.ftruncate(fd, size + 4096))  # noqa: B023
        attempt("punch a hole", lambda: punch(fd))  # noqa: B023
        os.close(fd)
    attempt("write through /proc/self/mem", through_mem)
    return results
