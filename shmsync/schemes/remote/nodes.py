"""fan_out="node": one copy of the weights goes to each node, and all of its workers attach to it there.

A send asks each worker for its node, once; one to some of the workers also asks the others, since all workers of a
node have the same version. It then asks one worker of each node, the leader, to publish the weights,
which reach it by the engine's own means (transport.call()). The answer is News: where the arena is, and which version
it has. All workers of the node get the News in place of weights, attach to the arena and bind their module to it. On
the trainer's own node the trainer publishes, and nobody leads.

When a leader dies, or still owes an answer to an earlier send, another worker of its node leads from then on, with an
arena of its own; the workers that attached to the earlier one move over. An arena ends with its leader's process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

from torch import nn

from ...engine.deadlines import deadline_after
from ...engine.publisher import Publisher, writer_of
from ...errors import ClosedError, ManifestMismatch, ProtocolError
from ...memory.arena import nested
from ...memory.manifest import Key
from ...memory.process import me
from ...memory.segment import Handle
from ..attachment import Attachment
from ..strategy import leaves_of, refuse_odd
from .base import WORDING, Exchange, Failed, Label, Packer, RemoteTransport, Steps, by_name, label_of, unpack

NODE_VARIABLE = "SHMSYNC_NODE"  # names the node of a process, in place of the host's name
_WORDING = WORDING._replace(do="answer it", doing="answering it")
_READERS = 256  # of an arena; a row is 128 bytes


def here(_: Any = None) -> str:
    """The node of this process: processes with the same one can share an arena."""
    identity = me()
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return f"{name}/{identity.boot_id.hex()[:8]}/{identity.pid_namespace:x}/{os.getuid()}"


# ---- in the process that publishes


class NodeArena:
    """The arena of one sender's weights on this node."""

    def __init__(self, session: str, slots: int, timeout: float) -> None:
        self.session = session
        self._options: dict[str, Any] = {"slots": slots, "max_readers": _READERS, "timeout": timeout}
        self.publisher: Publisher | None = None
        self.extra: dict[Key, Any] = {}  # of the newest version

    def publish(self, weights: Any, label: Label, deadline: float) -> News:
        """Make weights the label's version. Raises as Publisher does, with nothing changed."""
        leaves, extra = leaves_of(weights)
        if self.publisher is not None:
            writer = writer_of(self.publisher)
            try:
                writer.publish(nested(leaves), deadline, version=label.version)
            except ManifestMismatch:
                if self.publisher.readers():
                    raise
                self.publisher.close()  # it was made for weights that fitted no worker
                self.publisher = None
            else:
                writer.settle(deadline)  # others are told of this version
        if self.publisher is None:
            self.publisher = Publisher(nested(leaves), first_version=label.version, **self._options)
            writer_of(self.publisher).forget_source()
        self.extra = extra
        return News(label._replace(manifest=b"", extra=extra), self.publisher.handle)

    def close(self) -> None:
        """End the arena. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()


_led: dict[str, NodeArena] = {}  # what this process publishes, by model


def publish_here(weights: Any, slots: int, timeout: float) -> News:
    """As leader: publish weights that a sender sent for the workers of this node."""
    label = label_of(weights)
    if label is None:
        raise ProtocolError("a node's leader publishes what a sender of shmsync sent; these weights have no label")
    arena = _led.get(label.model_id)
    if arena is None or arena.session != label.session:
        if not _led:
            util.Finalize(None, _close_led, exitpriority=25)
        if arena is not None:  # of a trainer that was started again
            arena.close()
        arena = _led[label.model_id] = NodeArena(label.session, slots, timeout)
    return arena.publish(weights, label, deadline_after(None, timeout))


def _close_led() -> None:
    for arena in _led.values():
        arena.close()


# ---- in every worker


@dataclass(frozen=True)
class News:
    """A version that lies in an arena of this node. WeightReceiver.apply_weights() takes it like weights."""

    label: Label
    handle: Handle

    def apply(self, receiver: Any, model: Any) -> None:
        """Let the receiver's model use the arena, which takes the place of an earlier one, at this version."""
        if receiver.attached is None or receiver.attached.handle != self.handle:
            made = Attachment(self.handle, receiver._scheme, receiver.worker_idx)
            try:
                receiver._strategy.check_weights(model, made.subscriber.weights)
            except ManifestMismatch:
                made.close()  # an arena that nobody can use is made anew
                raise
            receiver.leave()  # a module is bound to one arena
            receiver.attached = made
        receiver.attached.move_to(self.label.version)
        receiver.attached.bind(model)
        if isinstance(model, nn.Module):
            for path, state in self.label.extra.items():
                model.get_submodule(".".join(path)).set_extra_state(state)


# ---- in the trainer


def ask(exchange: Exchange, index: int) -> Steps:
    """Ask a worker where it runs."""
    transport: Any = exchange.workers[index]
    transport.node = yield transport.call(here)


class NodeFanOut:
    """The sends of one sender, by node."""

    def __init__(self, scheme: Any, packer: Packer) -> None:
        self._packer = packer
        self._options = scheme.slots, scheme.timeout
        self._near = NodeArena(packer.session, *self._options)  # this node's
        self._home = here()
        self._closed = False

    def post(
        self,
        source: Any,
        label: Label,
        chosen: Mapping[int, RemoteTransport],
        everybody: Mapping[int, RemoteTransport],
        deadline: float,
    ) -> Exchange:
        """Begin a send.

        Raises ValueError when some of the workers that share an arena are chosen, but not all, WorkerDied and
        AckTimeout when that cannot be known, and what publishing on this node raises; then nothing was sent.
        """
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")
        self._check_whole_nodes(label.version, chosen, everybody, deadline)
        refuse_odd(leaves_of(source)[0])
        news: dict[str, News] = {}  # by node
        leaders: dict[str, int] = {}  # by node: the first of its workers that owes no answer
        packed: list[Any] = []  # what leaders get, once there is one

        def near() -> News:
            if self._home not in news:
                news[self._home] = self._near.publish(source, label, deadline)
            return news[self._home]

        def steps(exchange: Exchange, index: int) -> Steps:
            transport: Any = chosen[index]
            if transport.node is None:
                yield from ask(exchange, index)
            node = transport.node
            if node == self._home:
                near()
            while node not in news:
                leader = leaders.setdefault(node, index)
                if leader == index:
                    if not packed:
                        packed.append(transport.wrap(self._packer.pack(source, label.model_id, label.version)))
                    news[node] = yield transport.call(publish_here, packed[0], *self._options)
                elif leader in exchange.open:
                    yield None  # until it has published
                elif leader in exchange.outcome.failed:  # others of its node keep what they have, too
                    raise Failed(exchange.outcome.failed[leader])
                else:
                    del leaders[node]
            yield transport.start(news[node])

        if any(transport.node == self._home for transport in chosen.values()):
            near()  # refuses what does not fit before anything is sent
        return Exchange(label.version, chosen, steps)

    def _check_whole_nodes(
        self,
        version: int,
        chosen: Mapping[int, RemoteTransport],
        everybody: Mapping[int, RemoteTransport],
        deadline: float,
    ) -> None:
        living = {index: each for index, each in everybody.items() if each.connected and not each.reported}
        if living.keys() <= chosen.keys():
            return
        unknown = {index: each for index, each in living.items() if each.node is None}
        Exchange(version, unknown, ask, _WORDING).finish(deadline, "only the question where each worker runs")
        nodes = {transport.node for transport in chosen.values()}
        left_out = [index for index, each in living.items() if index not in chosen and each.node in nodes]
        if left_out:
            raise ValueError(
                f"workers {left_out} share one arena with workers of this send, which cannot reach {sorted(chosen)} "
                "alone; send to all workers of a node, or use fan_out=None"
            )

    def last_weights(self) -> Any:
        """A copy of what was sent last; None: nothing yet."""
        packed, near = self._packer.newest, self._near.publisher
        if near is not None and (packed is None or near.version >= packed.label.version):
            return near.state_dict() | by_name(self._near.extra)
        return None if packed is None else unpack(packed.label, packed.buffer.clone())

    def close(self) -> None:
        """End the arena of this node. Idempotent."""
        self._closed = True
        self._near.close()
