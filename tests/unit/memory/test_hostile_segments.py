"""Whatever the words of a control segment say, a reader gets an error, and reads nothing that lies elsewhere."""

import os
import struct

import pytest
import torch

import shmsync
from shmsync import _native, cli
from shmsync.memory import inspection as observed
from shmsync.memory.manifest import Manifest, fingerprint
from support.faults.forged import forge, identity, write
from support.processes import segment_path

CURRENT = 256


def forge_manifest(name, text):
    """Give an arena another manifest; the file grows where it has to."""
    path = segment_path(name)
    found = identity(path)
    size = _native.segment_bytes(found["slots"], found["readers"], len(text))
    os.truncate(path, max(size, path.stat().st_size))
    write(name, found["manifest_offset"], text)
    os.truncate(path, size)
    forge(name, manifest_bytes=len(text), segment_bytes=size, fingerprint=fingerprint(text))


def word64(value):
    return struct.pack("<Q", value % 2**64)


@pytest.fixture
def pub(publisher):
    made = publisher({"t": torch.arange(64.0)}, slots=2)
    whole = segment_path(made.name).read_bytes()
    yield made
    segment_path(made.name).write_bytes(whole)


@pytest.mark.parametrize("slot", [2])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
def test_a_slot_that_is_not_there_is_never_read(pub, subscriber, slot, consistency):
    sub = subscriber(pub, consistency=consistency)
    was = segment_path(pub.name).read_bytes()[CURRENT : CURRENT + 8]
    write(pub.name, CURRENT, word64(1 << 8 | slot))
    for call in (sub.refresh, sub.snapshot, lambda: sub.run(lambda weights: weights["t"].sum())):
        with pytest.raises(shmsync.ArenaCorrupt, match=f"slot {slot}"):
            call()
    with pytest.raises(shmsync.ArenaCorrupt):
        shmsync.Subscriber(pub.handle, consistency=consistency)
    assert cli.main(["list"]) == 0
    write(pub.name, CURRENT, was)
    with sub.read() as section:
        assert section.weights["t"][5] == 5


NO_MANIFESTS = {
    "nested deep": b"[" * 200_000,
    "no UTF-8": b"\xff\xfe\x00",
    "of another version": b'{"leaves":[{"key":"t"}],"filtered":false}',
    "a dtype that torch lacks": b'{"leaves":[[["t"],"distributed",[64],0,0]],"filtered":false}',
    "beyond its slot": b'{"leaves":[[["t"],"float32",[1048576],0,0]],"filtered":false}',
}


@pytest.mark.parametrize("what", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused(what):
    with pytest.raises(shmsync.ArenaCorrupt):
        Manifest.from_json(NO_MANIFESTS[what], 2 << 20)


@pytest.mark.parametrize("what", ["nested deep", "of another version"])
def test_a_forged_manifest_is_refused_by_everybody(pub, capsys, what):
    forge_manifest(pub.name, NO_MANIFESTS[what])
    with pytest.raises(shmsync.ArenaCorrupt):
        shmsync.Subscriber(pub.name, timeout=0.1)
    with pytest.raises(shmsync.ArenaCorrupt):
        observed.manifest_of(pub.name)
    assert cli.main(["list"]) == 0
    cli.main(["inspect", pub.name])
    said = capsys.readouterr()
    assert "manifest cannot be read" in said.out + said.err and "Traceback" not in said.err


def test_what_publishers_write_is_a_manifest(publisher):
    """Tied, empty, without dimensions, nested, permuted, cast."""
    tied = torch.ones(3)
    weights = {"a.b": tied, "a.c": tied, "none": torch.empty(0, 4), "one": torch.tensor(1.0), "t": torch.ones(2).half()}
    weights |= {"turned": torch.ones(2, 3).t(), "last": torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last)}
    pub = publisher(weights, dtype={"t": torch.float32})
    text = observed.manifest_of(pub.name).to_json()
    assert Manifest.from_json(text, 2 << 20).to_json() == text
    assert fingerprint(text) == identity(segment_path(pub.name))["fingerprint"]
