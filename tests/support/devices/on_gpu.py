"""What the workers of tests/gpu are told to do, in processes of their own. Values are numbers of versions."""

from __future__ import annotations

import os

import torch

import shmsync
from support.weights import stamp

WORDS = 1 << 20


def weights(value, device="cuda:0", words=WORDS):
    return {"a": torch.full((words,), float(value), device=device), "b": torch.full((7,), float(value), device=device)}


def only_device(state, visible):
    """Before CUDA is used in this process: it sees these GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def attach(state, handle, worker=0, **options):
    state.sub = shmsync.Subscriber(handle, worker=worker, timeout=30.0, **options)
    return state.sub.weights["a"].device.index


def attach_on_host(state, handle):
    state.sub = shmsync.Subscriber(handle, worker=0, timeout=30.0)


def seen(section):
    """(lowest, highest) of all values, as kernels find them."""
    a, b = section.weights["a"], section.weights["b"]
    return torch.stack([a.min(), a.max(), b.min(), b.max()])


def read(state):
    """The version of a section, and what its kernels saw: asked for inside, looked at after it."""
    with state.sub.read() as section:
        found = seen(section)
    return section.version, sorted(set(found.tolist()))


def read_on(state, version):
    state.sub.wait_version(version)
    return read(state)


def storm(state, last):
    """Read without pause until this version; how many sections, and those whose kernels saw anything else."""
    stream, sections, wrong, version = torch.cuda.Stream(), 0, [], 0
    with torch.cuda.stream(stream):
        while version < last:
            with state.sub.read() as section:
                found = seen(section)
                version = section.version
            sections += 1
            if sections % 16 == 0 or version >= last:  # looking stops the thread, so not each time
                values = set(found.tolist())
                if values != {float(version)}:
                    wrong.append((version, sorted(values)))
    return sections, wrong


def publisher(state, slots, name=None, value=1):
    state.source = weights(value)
    state.pub = shmsync.Publisher(state.source, slots=slots, name=name, device="cuda:0", timeout=30.0)
    return state.pub.handle


def publish(state, value, wait=None):
    stamp(state.source, value)
    return state.pub.publish(wait=wait)


def close(state):
    for name in ("sub", "pub"):
        if (end := getattr(state, name)) is not None:
            end.close()
            setattr(state, name, None)


def used(state):
    """Bytes of GPU 0 that are in use, by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free
