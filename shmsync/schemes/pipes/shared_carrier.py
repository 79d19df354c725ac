"""The trainer's side of the shared-memory scheme: weights are written into arenas, and pipes carry their versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from ...engine.deadlines import check_worker
from ...engine.publish_all import Publication, publish_all
from ...engine.publisher import Publisher, writer_of
from ...engine.write.writer import Writer
from ...errors import ClosedError
from ..arenas.plain_copy import PlainCopy
from ..arenas.publishers import ALL, Plan, Publishers
from ..link import messages
from ..link.messages import Tag, Tagged
from ..link.sender_end import Link, Route
from ..pickling import dumps, small
from ..strategy import WeightStrategy, refuse_bound
from .pipe_carrier import PipeCarrier, Posted


class SharedMemCarrier(PipeCarrier):
    """Writes weights once for each group of workers. One for all models of a scheme.

    Args:
        publishers: which make the arenas.
        plain: shared TensorDicts of the user's own by model id; every send writes them too.
        policy_weights: the user's dict, which shows the newest weights of each model.
        auto_register: let the first send of a model register it.
    """

    def __init__(self, publishers: Publishers, policy_weights: dict[str, Any], auto_register: bool) -> None:
        super().__init__()
        self.publishers = publishers
        self.policy_weights = policy_weights
        self.plain: dict[str, TensorDictBase] = dict(policy_weights)
        self._auto_register = auto_register
        self._strategy = WeightStrategy(partial=publishers.options.partial, dtype=publishers.options.dtype)
        self._joined: dict[str, dict[int, Link]] = {}  # the workers that the handle of the arena was sent to
        self._unconfirmed: dict[str, set[int]] = {}  # workers that have not answered it
        self._routes: dict[str, tuple[Route, Writer]] = {}
        self._copies: dict[str, PlainCopy] = {}  # how the plain TensorDicts get what is sent
        self._sent: dict[str, int] = {}  # versions of models whose only copy is the user's own memory
        self._set_up: set[str] = set()  # the models that have a sender
        self._closed = False

    @override
    def add(self, index: int, pipe: Any, process: Any = None) -> None:
        index = check_worker(index)
        self.publishers.group_of(index)  # or raise
        known = self.links.get(index)
        if known is None or known.pipe is not pipe or process is not None:
            super().add(index, pipe, process)

    def set_up(self, model_id: str, pipes: Sequence[Any]) -> None:
        """This model's workers are now those at the other ends of these pipes, and no others: the models share them.

        Raises ValueError when another model has other workers in their places, or devices were given for another number
        of workers.
        """
        self.publishers.devices.check_workers(len(pipes))
        if model_id in self._set_up:
            for index in [index for index in self.links if index >= len(pipes)]:
                del self.links[index]
                for joined in self._joined.values():
                    joined.pop(index, None)
                for unconfirmed in self._unconfirmed.values():
                    unconfirmed.discard(index)
        elif self._set_up:
            for index, pipe in enumerate(pipes):
                if index in self.links and self.links[index].pipe is not pipe:
                    raise ValueError(
                        f"worker {index} is reached over another pipe for {min(self._set_up)!r}, and all models of one "
                        f"scheme have the same workers; give {model_id!r} the same pipes, or its own scheme"
                    )
        self._set_up.add(model_id)

    def register_weights(self, model_id: str, weights: Any) -> None:
        """Register a model before its first send: `weights` are its version 1.

        Every send writes a plain shared TensorDict in place. Known workers are notified at once; the first send waits
        for their answers. Raises RuntimeError when the model is registered, ValueError for weights that are not
        a TensorDict.
        """
        if model_id in self.plain or self.publishers.version(model_id):
            raise RuntimeError(f"{model_id!r} is registered already; its layout is fixed, so send() new values for it")
        if not isinstance(weights, TensorDictBase):
            raise ValueError(f"weights to register are a TensorDict, not a {type(weights).__name__}")
        self.policy_weights[model_id] = self.plain[model_id] = weights
        if self.links:
            self.open(model_id)

    def open(self, model_id: str) -> None:
        """Make the arena of registered weights, and send its handle to the workers."""
        if not self.publishers.version(model_id):
            groups = self.publishers.chosen(self.links, self.links)
            self.publishers.plan(model_id, self.plain[model_id], groups, 1, len(self.links)).accept()
        self._register(model_id, self.links)

    @override
    def version(self, model_id: str) -> int:
        return max(self.publishers.version(model_id), self._sent.get(model_id, 0))

    @override
    def done_before_leaving(self, model_id: str, index: int) -> bool:
        # A forward uses a version before receive() answers for it, so a worker may leave with its work done.
        publisher = self.publishers.known_publisher(model_id, [self.publishers.group_of(index)])
        return publisher is not None and index in writer_of(publisher).applied_by(publisher.version)

    @override
    def plan(self, model_id: str, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        self._check_open()
        if not isinstance(weights, (nn.Module, TensorDictBase, Mapping)):
            raise ValueError(f"weights are a torch.nn.Module, a TensorDict or a dict, not a {type(weights).__name__}")
        if isinstance(weights, TensorDictBase):
            weights = WeightStrategy().extract_weights(weights)  # a path for each dotted key, as modules have them
        plain = self.plain.get(model_id)
        if not (self._auto_register or plain is not None or self.version(model_id)):
            known = sorted({*self.plain, *self.publishers.made})
            raise KeyError(
                f"{model_id!r} is not registered, only {known} are; call register_shared_weights(), or use "
                "auto_register=True"
            )
        living = self.living()
        # Without workers a plain TensorDict of the user's own is all there is.
        groups = self.publishers.chosen(links, living) if living else [ALL] if plain is None else []
        copy = self._plain_copy(model_id, self.publishers.known_publisher(model_id, groups))
        if copy is not None:
            given = copy.given(weights) if self.publishers.options.partial else None
        elif plain is not None:
            extracted = self._strategy.extract_weights(weights)
            fit = self._strategy.check_weights(plain, extracted)
            refuse_bound({key: fit.targets[key] for key in fit.given})
        plan = self.publishers.plan(model_id, weights, groups, version, len(self.links))

        def accept() -> None:
            plan.accept()
            if plain is not None:
                if copy is not None:
                    copy.write(given)
                else:
                    self._strategy.apply_weights(plain, extracted)
                self._sent[model_id] = version
            elif model_id not in self.policy_weights:
                self.policy_weights[model_id] = self.publishers.publisher(model_id, groups[0]).weights

        return plan._replace(accept=accept)

    def _plain_copy(self, model_id: str, publisher: Publisher | None) -> PlainCopy | None:
        """How the model's plain TensorDict gets what this publisher accepts; None: not so, or there is none."""
        plain, known = self.plain.get(model_id), self._copies.get(model_id)
        if plain is None or publisher is None or (known is not None and known.good_for(writer_of(publisher))):
            return None if publisher is None else known
        self._copies.pop(model_id, None)
        made = PlainCopy.of(plain, writer_of(publisher), partial=self.publishers.options.partial)
        if made is not None:
            self._copies[model_id] = made
        return made

    @override
    def announce(self, model_id: str, links: Mapping[int, Link], *, again: bool = False) -> dict[int, list[Tag]]:
        self._check_open()
        versions = {index: self.publishers.of_worker(model_id, index).version for index in links}
        self._register(model_id, links)
        unconfirmed = self._unconfirmed.get(model_id, set())
        tags = {}
        for index, link in links.items():
            tag = Tag(model_id, versions[index])
            tags[index] = [Tag(model_id, 0), tag] if index in unconfirmed else [tag]
            link.end.answered_by_version(tag)
            link.end.send(small((tuple(tag), messages.UPDATE)), tag, replaceable=True)
        unconfirmed.difference_update(links)
        return tags

    def _register(self, model_id: str, links: Mapping[int, Link]) -> None:
        """Send the arena's handle to the workers that do not have it, or got another one since."""
        joined = self._joined.setdefault(model_id, {})
        for index, link in links.items():
            if joined.get(index) is not link or link.end.announcers.get(model_id) is not self.sign:
                publisher = self.publishers.of_worker(model_id, index)
                if joined.get(index) is not link:
                    writer_of(publisher).forget_acks(index)
                tag = Tag(model_id, 0)
                link.end.send(dumps(Tagged(((model_id, publisher.handle), messages.REGISTER), tag, index)), tag)
                joined[index] = link
                link.end.announcers[model_id] = self.sign
                self._unconfirmed.setdefault(model_id, set()).add(index)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down, and its arenas are gone; make a new one")

    # The common case: weights for all workers, which have attached to the arena.

    def is_common(self, model_id: str) -> bool:
        """Do all workers share one arena that they have attached to, and is none of them known to be dead?"""
        if self._closed:
            return False  # post() raises
        for link in self.links.values():
            if link.reported or link.end.announcers.get(model_id) is not self.sign:
                return False
        known = self._routes.get(model_id)
        if known is not None and known[0].links == self.links:
            return True
        publisher = self.publishers.only(model_id)
        attached = self._joined.get(model_id) == self.links and not self._unconfirmed.get(model_id)
        if publisher is None or not attached or not self.links:
            return False
        route = Route(self.links)
        if route.complete:
            self._routes[model_id] = route, writer_of(publisher)
        return route.complete

    def post_common(self, model_id: str, weights: Any, deadline: float) -> Posted:
        """As post(), in the case that is_common(). The result has the workers that have not answered in a moment."""
        route, writer = self._routes[model_id]
        copy, version = self._copies.get(model_id), None
        if model_id not in self.plain or (copy is not None and copy.good_for(writer)):
            if isinstance(weights, nn.Module):
                due = Publication(writer, weights, self.publishers.optional(model_id))
                (version,) = publish_all([due], None, deadline)
            else:
                version = writer.publish_like(weights, deadline)
        if version is None:  # post() checks the weights, and the TensorDict of the user's own
            return self.post(model_id, weights, self.reach(model_id, list(self.links)), deadline)
        if copy is not None and weights is not self.plain[model_id]:
            copy.write(None)
        tag = Tag(model_id, version)
        named = (model_id, version)
        late = route.exchange(small((named, messages.UPDATE)), small((named, messages.UPDATED)), tag, deadline)
        if not late:
            return Posted(model_id, version, {}, {})
        return Posted(model_id, version, {index: self.links[index] for index in late}, {index: [tag] for index in late})

    def close(self) -> None:
        """End the arenas. Idempotent."""
        self._closed = True
        self._copies.clear()
        self.publishers.close()
