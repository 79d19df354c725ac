"""fan_out="node": one copy of the weights goes to each node, and all of its workers attach to it there.

A send asks each worker for its node, once. A send to some of the workers also asks the others, because all workers of
a node have the same version. It then asks one worker of each node, the leader, to publish the weights, which reach it
by the engine's own means (transport.call()). The answer is News: where the arena is, and which version it has. All
workers of the node get the News in place of weights, attach to the arena and bind their module to it. On the trainer's
own node the trainer publishes, and nobody leads.

When a leader dies, or still owes an answer to an earlier send, another worker of its node leads from then on, with an
arena of its own; the workers that attached to the earlier one move over. An arena ends with its leader's process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.deadlines import deadline_after
from ...errors import ManifestMismatch, ProtocolError
from ...memory.arena import nested
from ...memory.process import me
from ..arenas import ALL, ModelArenas
from ..strategy import leaves_of, refuse_odd
from .base import WORDING, Exchange, Failed, Label, News, Packer, RemoteTransport, Steps, by_name, label_of, unpack

NODE_VARIABLE = "SHMSYNC_NODE"  # names the node of a process, in place of the host's name
_WORDING = WORDING._replace(do="answer it", doing="answering it")
_WORKERS = 128  # of a node


def here(_: Any = None) -> str:
    """The node of this process: processes with the same one can share an arena."""
    identity = me()
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return f"{name}/{identity.boot_id.hex()[:8]}/{identity.pid_namespace:x}/{os.getuid()}"


# ---- in the process that publishes


@dataclass
class NodeOptions:
    """How the arena of a node is made: what ModelArenas asks of a scheme on one machine."""

    slots: int
    timeout: float
    partial: bool
    dtype: None = None  # weights were cast before
    device: None = None
    groups: None = None


# What this process publishes, by model, the session of its sender, and how it is made.
_led: dict[str, tuple[ModelArenas, str, NodeOptions]] = {}


def publish_here(weights: Any, options: NodeOptions) -> News:
    """As leader: publish weights that a sender sent for the workers of this node."""
    label = label_of(weights)
    if label is None:
        raise ProtocolError("a node's leader publishes what a sender of shmsync sent; these weights have no label")
    arenas, session, _ = _led.get(label.model_id, (None, "", None))
    if arenas is None or session != label.session:
        if arenas is not None:  # of a trainer that was started again
            arenas.close()
        arenas = ModelArenas(label.model_id, options)
        _led[label.model_id] = arenas, label.session, options
    return publish(arenas, weights, label, deadline_after(None, options.timeout))


def publish(arenas: ModelArenas, weights: Any, label: Label, deadline: float) -> News:
    """Make weights the label's version in the one arena of a node. Raises as Publisher does, with nothing changed."""
    leaves, extra = leaves_of(weights)
    try:
        arenas.publish(nested(leaves), [ALL], label.version, _WORKERS, deadline)
    except ManifestMismatch:
        if not arenas.by_group or arenas.by_group[ALL].readers():
            raise
        arenas.give_up()  # it was made for weights that fitted no worker
        return publish(arenas, weights, label, deadline)
    return News(label._replace(manifest=b"", extra=extra), arenas.by_group[ALL].handle)


# ---- in the trainer


def ask(exchange: Exchange, index: int) -> Steps:
    """Ask a worker where it runs."""
    transport: Any = exchange.workers[index]
    transport.node = yield transport.call(here)


class NodeFanOut:
    """The sends of one sender, by node."""

    def __init__(self, scheme: Any, packer: Packer) -> None:
        self._packer = packer
        self._options = NodeOptions(scheme.slots, scheme.timeout, scheme.partial)
        self._near = ModelArenas("", self._options)  # this node's
        self._newest: News | None = None  # of it
        self._home = here()

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
        self._check_whole_nodes(label.version, chosen, everybody, deadline)
        refuse_odd(leaves_of(source)[0])
        news: dict[str, News] = {}  # by node
        leaders: dict[str, int] = {}  # by node: the first of its workers that owes no answer
        packed: list[Any] = []  # what leaders get, once there is one

        def near() -> None:
            if self._home not in news:
                news[self._home] = self._newest = publish(self._near, source, label, deadline)

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
                    news[node] = yield transport.call(publish_here, packed[0], self._options)
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
        packed, near, news = self._packer.newest, self._near.by_group.get(ALL), self._newest
        if near is not None and news is not None and (packed is None or near.version >= packed.label.version):
            return near.state_dict() | by_name(news.label.extra)
        return None if packed is None else unpack(packed.label, packed.buffer.clone())

    def close(self) -> None:
        """End the arena of this node. Idempotent."""
        self._near.close()
