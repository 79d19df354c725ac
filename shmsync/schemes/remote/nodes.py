"""fan_out="node": one copy of the weights goes to each node, and all of its workers attach to it there.

A send goes to all workers, because those of a node have the same version. It asks each worker for its node, once. Then
it asks one worker of each node, the leader, to publish the weights, which reach it by the engine's own means
(transport.call()). The answer is News: where the arena is, and which version it has. All workers of the node get the
News in place of weights, attach to the arena and bind their module to it. On the trainer's own node the trainer
publishes, and nobody leads.

A leader leads in all sends. When it dies, or still owes an answer to an earlier send, another worker of its node leads
from then on, with an arena of its own; the workers that attached to the earlier one move over. An arena ends with its
leader's process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ...engine.deadlines import deadline_after
from ...errors import ManifestMismatch
from ...memory.arena import nested
from ...memory.process import me
from ..arenas import ALL, ArenaOptions, ModelArenas
from ..strategy import leaves_of, refuse_odd
from .base import WAIT, Exchange, Failed, Steps
from .packing import Label, News, Packer, state_dict_of, unpack

NODE_VARIABLE = "SHMSYNC_NODE"  # names the node of a process, in place of the host's name
_WORKERS = 128  # of a node


def here(_: Any = None) -> str:
    """The node of this process: processes with the same one can share an arena."""
    identity = me()
    name = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return f"{name}/{identity.boot_id.hex()[:8]}/{identity.pid_namespace:x}/{os.getuid()}"


class NodeArena:
    """What a process publishes for the workers of its node."""

    def __init__(self, slots: int, timeout: float) -> None:
        self.timeout = timeout
        self._arenas = ModelArenas("", ArenaOptions(slots, timeout))
        self.newest: News | None = None

    def publish(self, weights: Any, label: Label, deadline: float) -> News:
        """Make weights the label's version. Raises as Publisher does, with nothing changed."""
        arenas, (leaves, extra) = self._arenas, leaves_of(weights)
        try:
            arenas.publish(nested(leaves), [ALL], label.version, _WORKERS, deadline)
        except ManifestMismatch:
            if not arenas.by_group or arenas.by_group[ALL].readers():
                raise
            self.close()  # it was made for weights that fitted no worker
            return self.publish(weights, label, deadline)
        self.newest = News(label._replace(extra=extra), arenas.by_group[ALL].handle)
        return self.newest

    def state_dict(self) -> dict[str, Any]:
        """A copy of the newest version, which must be there."""
        assert self.newest is not None
        return self._arenas.by_group[ALL].state_dict() | state_dict_of({}, self.newest.label)

    def close(self) -> None:
        """End the arena. Idempotent."""
        self._arenas.close()
        self.newest = None


_led: dict[str, tuple[str, NodeArena]] = {}  # what this process publishes as leader, and its sender's session, by model


def publish_here(weights: Any, *options: Any) -> News:
    """As leader: publish weights that a sender sent for the workers of this node."""
    label: Label = weights.label
    session, arena = _led.get(label.model_id, ("", None))
    if arena is None or session != label.session:
        if arena is not None:  # of a trainer that was started again
            arena.close()
        arena = NodeArena(*options)
        _led[label.model_id] = label.session, arena
    return arena.publish(weights, label, deadline_after(None, arena.timeout))


class NodeFanOut:
    """The sends of one sender, by node."""

    def __init__(self, scheme: Any, packer: Packer) -> None:
        self.packer = packer
        self.options = scheme.slots, scheme.timeout
        self.near = NodeArena(*self.options)  # this node's
        self.home = here()
        self.leaders: dict[str, int] = {}  # by node: the worker that publishes there

    def post(self, source: Any, label: Label, workers: Mapping[int, Any], deadline: float) -> Exchange:
        """Begin a send to all workers. Raises as NodeExchange."""
        return NodeExchange(self, source, label, workers, deadline)

    def last_weights(self) -> Any:
        """A copy of what was sent last; None: nothing yet."""
        packed, near = self.packer.newest, self.near.newest
        if near is not None and (packed is None or near.label.version >= packed.label.version):
            return self.near.state_dict()
        return None if packed is None else unpack(packed.label, packed.manifest, packed.buffer.clone())


class NodeExchange(Exchange):
    """One send, with the News of each node that has its weights.

    Raises what publishing on this node raises, before anything is sent.
    """

    def __init__(self, fan_out: NodeFanOut, source: Any, label: Label, workers: Mapping[int, Any], deadline: float):
        refuse_odd(leaves_of(source)[0])
        self._fan_out, self._source, self._label, self._deadline = fan_out, source, label, deadline
        self._news: dict[str, News] = {}  # by node
        self._content: Any = None  # for leaders
        nodes = {transport.node for transport in workers.values()}
        if fan_out.home in nodes:
            self._publish_at_home()  # refuses what does not fit before anything is sent
        if nodes - {fan_out.home}:  # before wait_async() the trainer may change its weights
            packed = fan_out.packer.pack(source, label.model_id, label.version)
            self._content = next(iter(workers.values())).wrap(packed)
            self._source = unpack(packed.label, packed.manifest, packed.buffer)
        super().__init__(label.version, workers, {})

    def _publish_at_home(self) -> None:
        if self._fan_out.home not in self._news:
            self._news[self._fan_out.home] = self._fan_out.near.publish(self._source, self._label, self._deadline)

    @override
    def steps(self, index: int) -> Steps:
        fan_out, news, transport = self._fan_out, self._news, self.workers[index]
        if transport.node is None:
            transport.node = yield transport.call(here)
        node = transport.node
        if node == fan_out.home:
            self._publish_at_home()
        while node not in news:
            leader = fan_out.leaders.get(node, index)
            if leader in self.outcome.failed:  # others of its node keep what they have, too
                raise Failed(self.outcome.failed[leader])
            if leader != index and leader in self.open and not self.is_behind(leader):
                yield WAIT  # until it has published
            else:
                fan_out.leaders[node] = index
                news[node] = yield transport.call(publish_here, self._content, *fan_out.options)
        yield transport.start(news[node])
