"""fan_out="node": one copy of the weights goes to each node, and all of its workers attach to it there.

A send asks each worker for its node, once. It then asks one worker of each node, the leader, to publish the weights,
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
from functools import cache
from typing import Any

from ...engine.deadlines import deadline_after
from ...engine.publisher import Publisher, writer_of
from ...errors import ClosedError, ManifestMismatch
from ...memory.arena import nested
from ...memory.process import me
from ..strategy import leaves_of
from .base import Exchange, RemoteTransport, Steps
from .packing import News, PackedWeights, unpack

NODE_VARIABLE = "SHMSYNC_NODE"  # names the node of a process, in place of the host's name
_READERS = 256  # of an arena; a row is 128 bytes


def here(_: Any = None) -> str:
    """The node of this process: processes with the same one can share an arena."""
    identity = me()
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return f"{name}/{identity.boot_id.hex()[:8]}/{identity.pid_namespace:x}/{os.getuid()}"


class NodeArena:
    """The arena of one sender's weights on this node."""

    def __init__(self, session: str, slots: int, timeout: float) -> None:
        self.session = session
        self._options: dict[str, Any] = {"slots": slots, "max_readers": _READERS, "timeout": timeout}
        self._publisher: Publisher | None = None

    def publish(self, weights: Any, deadline: float) -> News:
        """Make weights that were sent the version of their label. Raises as Publisher does, with nothing changed."""
        label, leaves = weights.label, nested(leaves_of(weights)[0])
        if self._publisher is not None:
            try:
                writer_of(self._publisher).publish(leaves, deadline, version=label.version)
            except ManifestMismatch:
                if self._publisher.readers():
                    raise
                self.close()  # it was made for weights that fitted no worker
        if self._publisher is None:
            self._publisher = Publisher(leaves, first_version=label.version, **self._options)
            writer_of(self._publisher).forget_source()
        return News(label, self._publisher.handle)

    def close(self) -> None:
        """End the arena. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


_led: dict[str, NodeArena] = {}  # what this process publishes as leader, by model


def publish_here(weights: Any, session: str, slots: int, timeout: float) -> News:
    """As leader: publish weights that a sender sent for the workers of this node."""
    model_id = weights.label.model_id
    arena = _led.get(model_id)
    if arena is None or arena.session != session:
        if arena is not None:  # of a trainer that was started again
            arena.close()
        arena = _led[model_id] = NodeArena(session, slots, timeout)
    return arena.publish(weights, deadline_after(None, timeout))


class NodeFanOut:
    """The sends of one sender, by node."""

    def __init__(self, scheme: Any, session: str) -> None:
        self._options = session, scheme.slots, scheme.timeout
        self._near = NodeArena(*self._options)  # this node's
        self._home = here()
        self._closed = False

    def check(self, chosen: Mapping[int, RemoteTransport], everybody: Mapping[int, RemoteTransport]) -> None:
        """Raise ValueError when some of the workers that share an arena are chosen, but not all of them."""
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")
        nodes = {transport.node for transport in chosen.values()} - {None}
        left_out = [i for i, t in everybody.items() if i not in chosen and t.node in nodes and not t.reported]
        if left_out:
            raise ValueError(
                f"workers {left_out} share one arena with workers of this send, which cannot reach {sorted(chosen)} "
                "alone; send to all workers of a node, or use fan_out=None"
            )

    def post(self, packed: PackedWeights, chosen: Mapping[int, Any], deadline: float) -> Exchange:
        """Begin a send. Raises what publishing on this node raises; then nothing was sent."""
        label = packed.label
        news: dict[str, News] = {}  # by node
        leading: set[str] = set()  # the nodes of which a worker publishes now
        wrap = cache(lambda: next(iter(chosen.values())).wrap(packed))

        def publish_at_home() -> None:
            if self._home not in news:
                weights = unpack(label, packed.manifest, packed.buffer)
                news[self._home] = self._near.publish(weights, deadline)

        def steps(index: int) -> Steps:
            transport = chosen[index]
            if transport.node is None:
                transport.node = yield transport.call(here)
            node = transport.node
            if node == self._home:
                publish_at_home()
            while node not in news:
                if node in leading:
                    yield None  # until that worker has published, is dead or has failed
                    continue
                leading.add(node)
                try:
                    news[node] = yield transport.call(publish_here, wrap(), *self._options)
                finally:
                    leading.remove(node)
            yield transport.start(news[node])

        if any(transport.node == self._home for transport in chosen.values()):
            publish_at_home()  # refuses what does not fit before anything is sent
        return Exchange(label.version, chosen, steps)

    def close(self) -> None:
        """End the arena of this node. Idempotent."""
        self._closed = True
        self._near.close()
