"""What the fuzzers try: each target makes inputs that are nearly right, and looks what comes of them.

An input is refused with a typed error, or read; nothing else. Memory is bounded by what came.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import socket
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

import shmsync
from shmsync import _native
from shmsync.engine.outcome import Failure
from shmsync.memory import inspection as observed
from shmsync.memory.control import segment
from shmsync.memory.control.segment import Handle
from shmsync.memory.manifest import Manifest
from shmsync.memory.system.process import Peers
from shmsync.schemes.link.connection import Channel
from shmsync.schemes.link.messages import Tag, Tagged
from shmsync.schemes.link.worker_end import WorkerEnd
from shmsync.schemes.remote.distributed.rank_address import read_address, write_address
from shmsync.schemes.remote.distributed.rank_messages import RankAnswer, RankMessage, RelayEnd, wrong_with
from shmsync.schemes.remote.location import Address, here
from shmsync.schemes.remote.packed_weights import Label, Packer, unpack
from support.faults.forged import FIELDS, identity, packed
from support.fuzz.mutating import Mutator
from support.processes import segment_path
from support.weights import tensors

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
ROOM = 1 << 20  # bytes of a slot


class Target:
    """One thing that reads what others wrote."""

    plain = False  # draws only what JSON has

    def __init__(self, seed: int) -> None:
        self.draw = Mutator(seed, plain=self.plain)
        self.accepted = self.refused = 0

    def once(self) -> None:
        """Draw an input, and try it."""
        try:
            self.attempt()
        except shmsync.ShmSyncError:
            self.refused += 1
        else:
            self.accepted += 1

    def attempt(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


class ManifestBytes(Target):
    """The JSON of a manifest, changed as a value and as bytes."""

    plain = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._known = [path.read_bytes() for path in sorted((CORPUS / "manifest").iterdir())]
        self._documents = []
        for text in self._known:
            with contextlib.suppress(ValueError, RecursionError):
                self._documents.append(json.loads(text))

    def attempt(self) -> None:
        if self.draw.random.random() < 0.3:
            text = self.draw.of_bytes(self.draw.random.choice(self._known))
        else:
            text = json.dumps(self.draw.of_value(self.draw.random.choice(self._documents))).encode()
        manifest = Manifest.from_json(text, ROOM)
        assert manifest.written_bytes <= ROOM, text
        for leaf in manifest.leaves:
            assert 0 <= leaf.offset <= leaf.offset + leaf.nbytes <= ROOM, text
            elements = leaf.nbytes // leaf.dtype.itemsize
            if 0 < elements < 10_000:  # each element has its own place, as torch shows for so few
                shown = torch.arange(elements).as_strided(leaf.shape, leaf.strides)
                assert shown.unique().numel() == elements, text
        assert len(manifest.by_key) == len(manifest.leaves), text
        assert Manifest.from_json(manifest.to_json(), ROOM) == manifest, text


class SegmentHeader(Target):
    """Identity, publication, slots, manifest and rows of a control segment, for subscribers and inspectors."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._pub = shmsync.Publisher({"t": torch.arange(8.0), "u.v": torch.ones(3)}, slots=2, max_readers=4)
        self._path = segment_path(self._pub.name)
        self._bytes = self._path.read_bytes()
        self._fields = identity(self._path)
        self._name = f"{self._pub.name}.fuzzed"
        self._copy = segment_path(self._name)
        self._fd = os.open(self._copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)  # else a new publisher removes it if no process is its owner
        self._peers = Peers()

    def _input(self) -> bytes:
        random = self.draw.random
        data = bytearray(self._bytes)
        if random.random() < 0.7:  # the crc is right: nothing but the checks of the values is in the way
            fields = dict(self._fields)
            for name in random.sample(FIELDS, random.choice((1, 1, 1, 2, 3))):
                if isinstance(fields[name], int):
                    wide = 64 if name in WIDE else 31 if name == "slab_fd" else 32
                    fields[name] = self.draw.number() % 2**wide
                else:
                    fields[name] = random.randbytes(len(fields[name]))
            data[:256] = packed(fields)
        if random.random() < 0.5:
            at = random.choice((0, 128, 256, 384, 512, 640, 65536)) + 8 * random.randrange(32)
            data[at : at + 8] = (self.draw.number() % 2**64).to_bytes(8, "little")
        if random.random() < 0.1:
            del data[random.choice((0, 1, 135, 255, 256, 500, 4096, 65536, 70000)) :]
        return bytes(data)

    def attempt(self) -> None:
        data = self._input()
        os.ftruncate(self._fd, len(data))
        os.pwrite(self._fd, data[:1024], 0)
        os.pwrite(self._fd, data[65536 : 65536 + 512], 65536) if len(data) > 65536 else None
        observed.look(self._name, self._peers)
        with contextlib.suppress(shmsync.ShmSyncError):
            observed.manifest_of(self._name)
        control, header = segment.attach(self._name, None, 0.0)
        observed.checked_manifest(self._name, control.manifest(), header)
        control.owners()

    def close(self) -> None:
        self._peers.close()
        os.close(self._fd)
        self._copy.unlink(missing_ok=True)
        self._pub.close()


WIDE = ("magic", "segment_bytes", "owner", "pid_namespace", "slot_bytes", "slab_inode", "manifest_offset",
        "manifest_bytes", "fingerprint")  # fmt: skip


class PipeFrames(Target):
    """Bytes of a pipe, in pieces, whole frames of nearly right messages among them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._open()

    def _open(self) -> None:
        self._ends = socket.socketpair()
        self._frames = _native.Frames(self._ends[1].fileno())

    def attempt(self) -> None:
        random = self.draw.random
        body = random.randbytes(random.choice((0, 1, 5, 300)))
        frame = len(body).to_bytes(4, "big") + body
        data = self.draw.of_bytes(frame * random.choice((1, 2, 3)))[:3000]
        found: list[bytes] = []
        while data:
            size = random.choice((1, 3, 4, 50, 3000))
            self._ends[0].send(data[:size])
            data = data[size:]
            while self._frames.read_into(found):
                pass
        assert sum(map(len, found)) < 4000
        if self._frames.garbage is not None or self._frames.incoming is not None or not self._frames.idle:
            self.close()
            self._open()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class PipeMessages(Target):
    """Messages for a worker and answers for a sender that are nearly right."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._ends = Pipe()
        self._channel = Channel.of(self._ends[0])
        self._worker = WorkerEnd.of(self._channel)
        tag = Tag("policy", 3)
        failure = Failure(tag, pickle.dumps(ValueError("no")), "no", "trace")
        self._seeds: list[Any] = [
            (("policy", {"w": 1.0}), "update_weights"),
            (("policy", 3), "update_weights"),
            (("policy", Handle("name", bytes(16))), "register_shared_weights"),
            (((("policy", "value"), (1, 3, 5.0))), "prepare_weights"),
            (((("policy",), (1, 3, 5.0))), "resume"),
            (("policy", {"w": ((1,), "float32", 5)}), "verify_weights"),
            (None, "updated"), (None, "registered"), (None, "prepared"), (failure, "failed"),
            (("policy", 3), "updated"),
            (("policy", ("policy",)), "no receiver"),
        ]  # fmt: skip

    def attempt(self) -> None:
        random = self.draw.random
        message: Any = self.draw.of_value(random.choice(self._seeds))
        if isinstance(message, tuple) and random.random() < 0.5:
            message = Tagged(message, self.draw.of_value(Tag("policy", 3)), self.draw.of_value(7))
        payload = pickle.dumps(message)
        if random.random() < 0.1:
            payload = payload[: random.randrange(len(payload))]
        self._ends[1].send_bytes(payload)
        try:
            self._worker.next(lambda each: True, time.monotonic())
        finally:
            self._channel.take_pending()
            while self._ends[1].poll():
                self._ends[1].recv_bytes()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class PackedParts(Target):
    """The label and the buffers of packed weights, as they come over Ray, RPC and torch.distributed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._packed = []
        for pieces in (None, 64):
            packer = Packer(pieces)
            for weights in ({"a": torch.ones(16), "b": torch.zeros(2, 3)}, {"n": {"t": torch.arange(100.0)}}):
                self._packed.append(packer.pack(weights, "policy", 1))

    def attempt(self) -> None:
        random = self.draw.random
        packed_weights = random.choice(self._packed)
        label, pieces = packed_weights.label, [piece.numpy().copy() for piece in packed_weights.pieces]
        if random.random() < 0.6:
            document = self.draw.of_value(json.loads(label.manifest))
            with contextlib.suppress(TypeError):
                label = label._replace(manifest=json.dumps(document).encode())
        if random.random() < 0.4:
            changed = self.draw.of_value((label.kind, label.starts))
            if isinstance(changed, tuple) and len(changed) == 2:
                label = label._replace(kind=changed[0], starts=changed[1])
        if random.random() < 0.4:
            at = random.randrange(len(pieces))
            pieces[at] = pieces[at][: random.randrange(len(pieces[at]) + 1)]
        if random.random() < 0.1:
            del pieces[random.randrange(len(pieces))]
        came = sum(piece.nbytes for piece in pieces)
        weights = unpack(Label(*label), *pieces)
        used = {}
        for leaf in tensors(weights):
            storage = leaf.untyped_storage()
            used[storage.data_ptr()] = storage.nbytes()
            leaf.sum()
        assert sum(used.values()) <= came, "there is more memory than came"


class RankAddresses(Target):
    """What a rank's key holds in the store of torch.distributed, and what the connection to it brings."""

    plain = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._store = HashStore()
        write_address(self._store, 1, Address("127.0.0.1", 5, bytes(32), here()))
        self._seed = bytes(self._store.get("NODE_1_address"))
        self._messages = [
            RankMessage(1, "bytes", b"label", 0, 64, None, False),
            RankAnswer(1, "updated", None),
            RelayEnd("session", True),
        ]

    def attempt(self) -> None:
        random = self.draw.random
        if random.random() < 0.5:
            data = self._seed
            json_too = random.random() < 0.7
            data = json.dumps(self.draw.of_value(json.loads(data))).encode() if json_too else self.draw.of_bytes(data)
            self._store.set("NODE_1_address", data)
            address = read_address(self._store, 1)
            assert address is not None
            socket.getaddrinfo(address.host, address.port, flags=socket.AI_NUMERICHOST)
            return
        message = random.choice(self._messages)
        changed = self.draw.of_value(list(message))
        if isinstance(changed, list) and len(changed) == len(message):
            changed = type(message)(*changed)
        if wrong_with(changed):
            raise shmsync.ProtocolError("no message")
        assert [type(a) for a in changed][:2] == [type(a) for a in message][:2] or changed[0] is None


TARGETS = {
    "manifest": ManifestBytes,
    "segment": SegmentHeader,
    "frames": PipeFrames,
    "messages": PipeMessages,
    "packed-weights": PackedParts,
    "ranks": RankAddresses,
}
