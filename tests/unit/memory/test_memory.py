"""Slabs, limits and the segment's checks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shmsync
from shmsync.memory import slab as _memory
from support.faults.forged import write
from support.processes import descriptors, segment_path


def test_too_little_memory_is_refused_beforehand(monkeypatch):
    monkeypatch.setattr(_memory, "available_bytes", lambda: 1 << 20)
    before = descriptors()
    with pytest.raises(shmsync.NoSpace, match=r"need 2,097,152 bytes but 1,048,576 are available"):
        shmsync.Publisher({"t": torch.ones(4)})
    assert descriptors() == before


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts(tmp_path, version):
    root = tmp_path / "sys/fs/cgroup"
    folder = (root / "memory" if version == 1 else root) / "outer" / "inner"
    folder.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, usage, reclaimable = names if version == 1 else ("memory.max", "memory.current", "inactive_file")
    for level, room in ((folder, 500 << 20), (folder.parent, 300 << 20)):
        (level / limit).write_text(f"{room + (10 << 20)}\n")
        (level / usage).write_text(f"{30 << 20}\n")
        (level / "memory.stat").write_text(f"anon 5\n{reclaimable} {20 << 20}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(
        "7:cpu:/x\n4:memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n"
    )
    assert _memory.available_bytes(tmp_path) == 300 << 20


def test_alignment(publisher):
    pub = publisher({"a": torch.ones(1), "b": torch.ones(3)}, slots=2)
    base = pub.weights["a"].untyped_storage().data_ptr()
    assert (pub.weights["b"].data_ptr() - base) % 256 == 0
    pub.publish()
    assert (pub.weights["a"].data_ptr() - base) % (2 << 20) == 0


@pytest.mark.parametrize(
    ("offset", "error"),
    [(0, shmsync.ArenaCorrupt), (8, shmsync.ArenaCorrupt), (24, shmsync.ArenaNotFound), (60, shmsync.ArenaCorrupt)],
    ids=["magic", "abi", "session", "identity"],
)
def test_a_damaged_header_is_refused(publisher, offset, error):
    pub = publisher({"t": torch.ones(4)})
    byte = segment_path(pub.name).read_bytes()[offset]
    write(pub.name, offset, bytes([byte ^ 0xFF]))
    with pytest.raises(error):
        shmsync.Subscriber(pub.handle, timeout=0.1)
    write(pub.name, offset, bytes([byte]))
    shmsync.Subscriber(pub.handle).close()


def test_a_damaged_manifest_is_refused(publisher):
    pub = publisher({"t": torch.ones(4)})
    write(pub.name, segment_path(pub.name).read_bytes().index(b'"leaves"'), b'"LEAVES"')
    with pytest.raises(shmsync.ArenaCorrupt, match="fingerprint"):
        shmsync.Subscriber(pub.handle)


def test_a_header_that_is_cut_off_while_it_is_read_ends_no_process(tmp_path):
    """A process that sweeps, lists or attaches reads segments that others may be shortening at that moment."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(4096))
    cut = "import os, sys\nwhile True: os.truncate(sys.argv[1], 0); os.truncate(sys.argv[1], 4096)"
    read = """
import os, sys
from shmsync import _native
fd = os.open(sys.argv[1], os.O_RDONLY)
seen = {_native.read_identity(fd) is None for _ in range(200_000)}
sys.exit(0 if seen == {True, False} else 3)
"""
    with subprocess.Popen([sys.executable, "-S", "-c", cut, path]) as other:
        try:
            assert subprocess.run([sys.executable, "-c", read, path], timeout=120, check=False).returncode == 0
        finally:
            other.kill()
