"""Whatever the words of a control segment say, a reader gets an error, and reads nothing that lies elsewhere."""

import json

import pytest
import torch

import shmsync
from shmsync import _native, cli
from shmsync.memory import inspection as observed
from shmsync.memory.manifest import Manifest, fingerprint
from support.faults.forged import CURRENT, forge, forge_manifest, identity, packed, segment_path, word64, write

PAGE = 65536


@pytest.fixture
def pub(publisher):
    made = publisher({"t": torch.arange(64.0)}, slots=2)
    whole = segment_path(made.name).read_bytes()
    yield made
    segment_path(made.name).write_bytes(whole)


def test_these_tests_know_where_the_words_are(pub):
    path = segment_path(pub.name)
    assert packed(identity(path)) == path.read_bytes()[:256]
    assert identity(path)["session"] == pub.handle.session


@pytest.mark.parametrize("below", [1, 400, PAGE, 2 * PAGE, 2**63], ids=str)
def test_a_size_that_wraps_around_is_refused(pub, below):
    size = 2**64 - below
    try:
        wrapped = _native.segment_bytes(2, 64, size)
    except (OverflowError, ValueError):
        wrapped = PAGE
    wrapped = wrapped if PAGE <= wrapped < 2**30 else 2 * PAGE
    with open(segment_path(pub.name), "r+b") as file:
        file.truncate(wrapped)
    forge(pub.name, manifest_bytes=size, segment_bytes=wrapped)
    with pytest.raises(shmsync.ArenaCorrupt):
        shmsync.Subscriber(pub.name, timeout=0.1)
    with pytest.raises(shmsync.ArenaCorrupt):
        observed.manifest_of(pub.name)
    assert cli.main(["list"]) == 0


@pytest.mark.parametrize("slot", [2, 127])
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
    assert cli.main(["list", "-v"]) == 0
    write(pub.name, CURRENT, was)
    with sub.read() as section:
        assert section.weights["t"][5] == 5


def leaf(*, key=("t",), dtype="float32", shape=(64,), offset=0, cast=0, more=()):
    return [key if isinstance(key, str) else list(key), dtype, shape, offset, cast, *more]


def strided(shape, strides, **more):
    return document(leaf(shape=shape, more=[strides], **more))


def document(*leaves, **more):
    return json.dumps({"leaves": list(leaves), "filtered": False, **more}).encode()


NO_MANIFESTS = {
    "nested deep": b"[" * 200_000,
    "nested deep in a shape": b'{"leaves":[[["t"],"float32",'
    + b"[" * 100_000
    + b"]" * 100_000
    + b',0,0]],"filtered":false}',
    "an infinite size": b'{"leaves":[[["t"],"float32",[1e999],0,0]],"filtered":false}',
    "no size": b'{"leaves":[[["t"],"float32",[NaN],0,0]],"filtered":false}',
    "an infinite offset": b'{"leaves":[[["t"],"float32",[4],1e999,0]],"filtered":false}',
    "no UTF-8": b"\xff\xfe\x00",
    "a number of many digits": b'{"leaves":[[["t"],"float32",[' + b"9" * 50_000 + b'],0,0]],"filtered":false}',
    "empty, with a size beyond all numbers": document(leaf(shape=[0, 2**70])),
    "empty, with a stride beyond all numbers": document(leaf(shape=[0, 2**40, 2**40])),
    "strides for fewer dimensions": strided([2, 3], [1]),
    "strides for more dimensions": strided([2, 3], [1, 2, 6]),
    "strides for no dimensions": strided([], [1]),
    "no strides for some": strided([2, 3], []),
    "strides of elements in one place": strided([2, 3], [0, 1]),
    "strides of elements that meet": strided([2, 3], [1, 1]),
    "strides with gaps": strided([2, 3], [4, 1]),
    "strides that end beyond the slot": strided([2, 3], [1 << 30, 1]),
    "a stride below nothing": strided([2, 3], [3, -1]),
    "a stride beyond all numbers": strided([1, 3], [2**63, 1]),
    "a stride whose bytes are beyond all numbers": strided([1, 3], [2**60, 1]),
    "a stride with a fraction": strided([2, 3], [3, 1.0]),
    "a stride as a truth value": strided([1, 3], [True, 1]),
    "strides as text": strided([2], "1"),
    "strides as a number": strided([2], 1),
    "strides of an empty tensor": strided([0, 3], [3, 1]),
    "strides twice": document(leaf(shape=[2, 3], more=[[1, 2], [1, 2]])),
    "a size with a fraction": document(leaf(shape=[2.5])),
    "a truth value as a size": document(leaf(shape=[True])),
    "a size as text": document(leaf(shape=["4"])),
    "a shape as text": document(leaf(shape="64")),
    "an offset as text": document(leaf(offset="0")),
    "a key as text": document(leaf(key="t")),
    "an empty key": document(leaf(key=())),
    "a key of lists": document(leaf(key=([1], 2))),
    "the same key twice": document(leaf(), leaf(offset=256)),
    "a key below a leaf": document(leaf(), leaf(key=("t", "u"), offset=256)),
    "a leaf above a key": document(leaf(key=("t", "u")), leaf(offset=256)),
    "a module of torch as dtype": document(leaf(dtype="distributed")),
    "a module that is not imported yet as dtype": document(leaf(dtype="_inductor")),
    "a dtype as list": document(leaf(dtype=["float32"])),
    "leaves that overlap": document(leaf(shape=[128]), leaf(key=("u",), offset=256)),
    "leaves as an object": b'{"leaves":{"t":1},"filtered":false}',
    "filtered as text": document(leaf(), filtered="no"),
}


@pytest.mark.parametrize("what", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused(what):
    with pytest.raises(shmsync.ArenaCorrupt):
        Manifest.from_json(NO_MANIFESTS[what], 2 << 20)


@pytest.mark.parametrize("what", ["nested deep", "an infinite size", "a key below a leaf"])
def test_a_forged_manifest_is_refused_by_everybody(pub, capsys, what):
    forge_manifest(pub.name, NO_MANIFESTS[what])
    with pytest.raises(shmsync.ArenaCorrupt):
        shmsync.Subscriber(pub.name, timeout=0.1)
    with pytest.raises(shmsync.ArenaCorrupt):
        observed.manifest_of(pub.name)
    assert cli.main(["list", "-v"]) == 0
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
