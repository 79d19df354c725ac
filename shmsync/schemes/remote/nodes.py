"""fan_out="node": one copy of the weights goes to each node, and all of its workers attach to it there.

A send asks one worker of each node, the leader, to publish the weights, which reach it by the engine's own means. The
answer is News: where the arena is, and which version it has. All workers of the node get the News in place of weights,
attach to the arena and bind their module to it. On the trainer's own node the trainer publishes, and nobody leads.

When a leader dies, or still owes an answer to an earlier send, another worker of its node leads from then on, with an
arena of its own; the workers that attached to the earlier one move over. An arena ends with its leader's process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, NamedTuple

from torch import nn

from ...engine.bind.guarded_methods import can_be_called
from ...engine.deadlines import deadline_after
from ...engine.publisher import Publisher, writer_of
from ...engine.subscriber import Subscriber, reader_of
from ...errors import ClosedError, ProtocolError
from ...memory.arena import nested
from ...memory.process import me
from ...memory.segment import Handle
from ..strategy import WeightStrategy, leaves_of, refuse_odd
from .base import Exchange, RemoteTransport, Steps
from .packed_weights import Label, Packer, label_of

NODE_VARIABLE = "SHMSYNC_NODE"  # names the node of a process, in place of the host's name
_READERS = 256  # of an arena; a row is 128 bytes


def here() -> str:
    """The node of this process: processes with the same one can share an arena."""
    identity = me()
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return f"{name}/{identity.boot_id.hex()[:8]}/{identity.pid_namespace:x}/{os.getuid()}"


# ---- in the process that publishes


class Options(NamedTuple):
    """Of the arenas of a scheme."""

    slots: int
    timeout: float


class NodeArena:
    """The arena of one model on this node."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.publisher: Publisher | None = None

    def publish(self, weights: Any, label: Label, deadline: float) -> News:
        """Make weights the label's version. Raises as Publisher does, with nothing changed."""
        leaves, extra = leaves_of(weights)
        refuse_odd(leaves)
        content, options = nested(leaves), self._options
        if self.publisher is None:
            self.publisher = Publisher(
                content, slots=options.slots, max_readers=_READERS, timeout=options.timeout, first_version=label.version
            )
            writer_of(self.publisher).forget_source()
        else:
            writer = writer_of(self.publisher)
            writer.publish(content, deadline, version=label.version)
            if writer.device is not None:  # others are told of this version
                with writer.lock:
                    writer.ready(deadline)
        return News(label._replace(manifest=b"", extra=extra), self.publisher.handle)

    def close(self) -> None:
        """End the arena. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()


_led: dict[str, tuple[str, NodeArena]] = {}  # by model: the sender's session, and what this process publishes for it


def publish_here(weights: Any, options: Options) -> News:
    """As leader: publish weights that a sender sent for the workers of this node."""
    label = label_of(weights)
    if label is None:
        raise ProtocolError("a node's leader publishes what a sender of shmsync sent; these weights have no label")
    session, arena = _led.get(label.model_id, ("", None))
    if arena is None or session != label.session:
        if not _led:
            util.Finalize(None, _close_led, exitpriority=25)
        if arena is not None:  # of a trainer that was started again
            arena.close()
        arena = NodeArena(options)
        _led[label.model_id] = label.session, arena
    return arena.publish(weights, label, deadline_after(None, options.timeout))


def _close_led() -> None:
    for _, arena in _led.values():
        arena.close()


# ---- in every worker


@dataclass(frozen=True)
class News:
    """A version that lies in an arena of this node. WeightReceiver.apply_weights() takes it like weights."""

    label: Label
    handle: Handle

    def attach(self, earlier: Attached | None, model: Any, receiver: Any) -> Attached:
        """Let the model use the arena, which takes the place of an earlier one."""
        attached = earlier
        if attached is None or attached.handle != self.handle or attached.model is not model:
            attached = Attached(self.handle, model, receiver, earlier)
        attached.apply(self.label)
        return attached


class Attached:
    """A worker's attachment to the arena of its node. A module is bound to it; anything else gets copies."""

    def __init__(self, handle: Handle, model: Any, receiver: Any, earlier: Attached | None) -> None:
        scheme = receiver._scheme
        self.handle, self.model = handle, model
        self.subscriber = Subscriber(
            handle, consistency=scheme.consistency, worker=receiver.worker_idx, timeout=scheme.timeout
        )
        try:
            if earlier is not None:
                earlier.close()  # a module is bound to one arena
                receiver._arena = None
            if isinstance(model, nn.Module):
                self.subscriber.bind(model, guard=can_be_called(model))
        except BaseException:
            self.subscriber.close()
            raise

    @property
    def version(self) -> int:
        """What the calling thread used last, else what is applied."""
        return self.subscriber.version

    def apply(self, label: Label) -> None:
        """Move to this version."""
        self.subscriber.refresh()
        if reader_of(self.subscriber).applied_version < label.version:
            raise ProtocolError(
                f"version {label.version} cannot be applied inside a read section of this thread; receive outside it",
                version=label.version,
            )
        if not isinstance(self.model, nn.Module):
            with self.subscriber.read() as section:
                WeightStrategy().apply_weights(self.model, section.weights)
            return
        for path, state in label.extra.items():
            self.model.get_submodule(".".join(path)).set_extra_state(state)

    def close(self) -> None:
        """Leave the arena. Idempotent."""
        self.subscriber.close()


# ---- in the trainer


class NodeFanOut:
    """The sends of one sender, by node."""

    def __init__(self, scheme: Any, packer: Packer) -> None:
        self._options = Options(scheme.slots, scheme.timeout)
        self._packer = packer
        self._near: NodeArena | None = None  # this node's
        self._home = here()
        self._leaders: dict[str, RemoteTransport] = {}
        self._closed = False

    def post(
        self,
        source: Any,
        model_id: str,
        version: int,
        chosen: Mapping[int, RemoteTransport],
        everybody: Mapping[int, RemoteTransport],
        deadline: float,
    ) -> Exchange:
        """Begin a send.

        Raises ValueError when some of the workers that share an arena are chosen, but not all, and what publishing on
        this node raises; then nothing was sent.
        """
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")
        _check_whole_nodes(chosen, everybody)
        made: dict[str, Any] = {}  # what leaders get, the News of each node, and which worker leads it in this send

        def near() -> News:
            if self._home not in made:
                self._near = self._near or NodeArena(self._options)
                label = Label(self._packer.session, model_id, version, "tensordict", b"", {})
                made[self._home] = self._near.publish(source, label, deadline)
            found: News = made[self._home]
            return found

        def steps(index: int) -> Steps:
            transport: Any = chosen[index]
            if transport.node is None:
                transport.node = yield transport.locate()
            node = transport.node
            if node == self._home:
                yield transport.start(near())
                return
            while node not in made:
                leader: Any = self._leaders.get(node)
                leads = leader is not transport and leader in exchange.open.values() and leader.node == node
                if leads and (leader.request is None or leader.request in exchange.mine.values()):
                    yield None  # until it has published
                    continue
                self._leaders[node] = transport
                content = made.get("content")
                if content is None:
                    content = made["content"] = transport.wrap(self._packer.pack(source, model_id, version))
                made[node] = yield transport.lead(content, self._options)
            yield transport.start(made[node])

        if any(transport.node == self._home for transport in chosen.values()):
            near()  # refuses what does not fit before anything is sent
        else:
            refuse_odd(leaves_of(source)[0])
        exchange = Exchange(version, chosen, steps)
        exchange.begin()
        return exchange

    def close(self) -> None:
        """End the arena of this node. Idempotent."""
        self._closed = True
        if self._near is not None:
            self._near.close()


def _check_whole_nodes(chosen: Mapping[int, RemoteTransport], everybody: Mapping[int, RemoteTransport]) -> None:
    nodes = {transport.node for transport in chosen.values()} - {None}
    left_out = [i for i, t in everybody.items() if i not in chosen and t.node in nodes and not t.reported]
    if left_out:
        raise ValueError(
            f"workers {left_out} share one arena with workers of this send, which cannot reach {sorted(chosen)} alone; "
            "send to all workers of a node, or use fan_out=None"
        )
