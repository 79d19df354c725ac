"""Weights in shared memory: written once, read by every worker without a copy. The engine behind the schemes' API.

A send publishes the weights in the arena (arenas.py) and posts the number of their version to each worker, which
answers when it uses that version (links.py). A worker is told of the arena before its first version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from ..engine.deadlines import check_worker, deadline_after, timeout_or_default
from ..engine.publisher import Publisher, writer_of
from ..engine.source.dtypes import Dtypes
from ..engine.subscriber import Consistency
from ..memory.devices import named
from . import messages
from .api import WeightSyncScheme
from .arenas import ALL, ArenaOptions, Groups, ModelArenas
from .attachment import SharedMemReceiver, attached
from .context import Arguments
from .links import Inbox, Link
from .messages import Message, Tag
from .pipe_transport import PipeTransport
from .sender import PipeSender, Posted
from .strategy import Form


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weights are written once into shared memory, which every worker maps; the worker's module is bound to it.

    Args:
        policy_weights: shared TensorDicts by model id: register_shared_weights() for each of them.
        strategy: the form that prepare_weights() extracts. Sends read a module directly.
        auto_register: let the first send of a model register it.
        slots: of the arenas; see Publisher.
        consistency: of the workers' subscribers; see Subscriber.
        groups: worker indices that share an arena, such as [[0, 1], [2, 3]]; None: all share one. A send goes to whole
            groups.
        timeout: default of a send, in seconds; math.inf waits without limit, None is 10.
        device: where the weights lie: "cpu", as with None, or a device that all workers see, as "cuda:0". A worker's
            module on another device gets a private copy of each version.
        partial: see WeightSyncScheme. The first weights that are sent make the arena; with partial=True the worker's
            module may have other leaves besides, which stay its own. Leaves that a send lacks keep the values that they
            have in the arena.
        dtype: see WeightSyncScheme.
        publisher: send through this Publisher, which stays the user's own; its arena is that of the first model.

    Attributes:
        policy_weights: the newest weights by model id: the registered TensorDict, or one over the arena. Writing into
            them outside update() is not protected.
    """

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        strategy: Form = "tensordict",
        auto_register: bool = True,
        *,
        slots: int = 1,
        consistency: Consistency = "pinned",
        groups: Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
        partial: bool = False,
        dtype: Dtypes = None,
        device: torch.device | str | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        super().__init__(strategy, partial=partial, dtype=dtype)
        if publisher is not None and (groups, dtype, device, slots, policy_weights) != (None, None, None, 1, None):
            raise ValueError(
                "publisher= has its own slots, device and dtype, and one arena for all workers; leave policy_weights=, "
                "slots=, device=, dtype= and groups= out"
            )
        if not isinstance(policy_weights, (dict, type(None))):
            raise TypeError(
                f"policy_weights is a dict of TensorDicts by model id, not a {type(policy_weights).__name__}; a pipe "
                "is for pipe=, or for init_on_worker(pipe=)"
            )
        self.policy_weights = {} if policy_weights is None else policy_weights
        self.auto_register = auto_register
        self.slots = slots
        self.consistency: Consistency = consistency
        self.groups = groups
        self.timeout = timeout_or_default(timeout)
        if device is not None:
            named(device)  # or raise
        self.device = device
        self._start(publisher)

    def _start(self, publisher: Publisher | None) -> None:
        self._groups = Groups(self.groups)
        self._publisher = publisher
        self._arenas: dict[str, ModelArenas] = {}  # by model
        self._links: dict[int, Link] = {}  # all models have the same workers
        for model_id, weights in self.policy_weights.items():
            self._register(model_id, weights)

    def arenas_of(self, model_id: str) -> ModelArenas:
        """The arenas of a model. The first model that asks has the user's own Publisher, if there is one."""
        if model_id not in self._arenas:
            given = None if self._arenas else self._publisher
            options = ArenaOptions(self.slots, self.timeout, self.partial, self.dtype, self.device, self.groups)
            self._arenas[model_id] = ModelArenas(model_id, options, given)
        return self._arenas[model_id]

    def _register(self, model_id: str, weights: Any) -> None:
        known = self._arenas.get(model_id)
        if known is not None and (known.registered is not None or known.version):
            raise RuntimeError(f"{model_id!r} is registered already; its layout is fixed, so send() new values for it")
        if not isinstance(weights, TensorDictBase):
            raise ValueError(f"weights to register are a TensorDict, not a {type(weights).__name__}")
        self.arenas_of(model_id).registered = weights

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Make this TensorDict the first version of a model, and let it show each later one.

        With slots=1 and one arena its leaves are moved into the arena: it is no second copy, and send() without other
        weights copies nothing. Leaves whose memory other tensors show stay where they are, with a warning, and each
        send copies them; so do all leaves with more slots, groups, dtype= or device=. Known workers are told at once.

        Raises RuntimeError when the model is registered, ValueError for weights that are not a TensorDict.
        """
        self.check_open("register_shared_weights")
        self._register(model_id, weights)
        self.policy_weights[model_id] = weights
        if self._sender is not None and self._sender.model_id == model_id and self._links:
            sender = self._sender
            assert isinstance(sender, SharedMemSender)
            try:
                sender.open()
            except BaseException:
                if not sender.arenas.by_group:  # these weights do not fit, and others may
                    sender.arenas.registered = None
                    del self.policy_weights[model_id]
                raise

    @override
    def create_transport(self, pipe_or_context: Any = None) -> SharedMemTransport:
        return SharedMemTransport(scheme=self, pipe=getattr(pipe_or_context, "pipe", pipe_or_context))

    @override
    def create_sender(self) -> SharedMemSender:
        return SharedMemSender(self)

    @override
    def create_receiver(self) -> SharedMemReceiver:
        return SharedMemReceiver(self)

    @override
    def shutdown(self) -> None:
        """End the arenas, or leave them."""
        super().shutdown()
        with contextlib.ExitStack() as stack:  # one that is busy keeps none of the others
            for arenas in self._arenas.values():
                stack.callback(arenas.close)
            if self._receiver is not None:
                stack.callback(self._receiver.close)

    def __getstate__(self) -> dict[str, Any]:
        # Workers stay here. Of the weights only those go along that the user registered: the others are sent.
        registered = {name: each.registered for name, each in self._arenas.items() if each.registered is not None}
        state = {**super().__getstate__(), "policy_weights": registered}
        here = ("_arenas", "_links", "_groups", "_publisher")
        return {name: value for name, value in state.items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(None)


class SharedMemSender(PipeSender):
    """Writes weights into the arenas of its scheme, and posts the number of their version."""

    _scheme: SharedMemWeightSyncScheme

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self._links = self._scheme._links

    @cached_property
    def arenas(self) -> ModelArenas:
        """Of its model."""
        return self._scheme.arenas_of(self._model_id)

    @property
    @override
    def version(self) -> int:
        return self.arenas.version

    @override
    def set_up(self, arguments: Arguments) -> None:
        """Take in the model and the workers; weights that are registered already go to these."""
        pipes = arguments.needed("pipes")
        for index in [index for index in self._links if index >= len(pipes)]:
            del self._links[index]
        super().set_up(arguments)
        if self.arenas.registered is not None and self._links:
            self.open()

    @override
    def register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        self._scheme._groups.of(check_worker(worker_idx))  # or raise
        super().register_worker(worker_idx, pipe_or_context, process)

    def open(self) -> None:
        """Make the arena of the registered weights, or of those that are known, and tell the workers where it is."""
        source = self.arenas.registered
        if source is None:
            source = self._source(None)
        self.arenas.open(source, self._next_version(self._links, self.version), len(self._links))
        self._show_weights()
        for publisher, links in self._by_arena(self._links):
            self._tell(publisher, links)

    def _groups(self, links: Mapping[int, Link]) -> list[int]:
        """The groups of these workers; without workers the arena of all is written."""
        if not self._links:
            return [ALL]
        return self._scheme._groups.of_all(links, [index for index, link in self._links.items() if not link.reported])

    @contextlib.contextmanager
    def update(self, *, timeout: float | None = None) -> Iterator[TensorDictBase]:
        """`with sender.update() as weights:` — write the new version in place; leaving sends it, as send() does.

        Protected by the arena's gate with slots=1, where nothing is copied, and by a free slot with more. An exception
        in the body is as in Publisher.update(): with slots=1 the weights are half written, and nobody reads them until
        the next send() of all weights.

        Args:
            timeout: seconds to wait for readers on entry, and again for the workers' answers on leaving; None is the
                scheme's default.

        Raises as send() does; ValueError with several groups, or without weights to begin with.
        """
        deadline = deadline_after(timeout, self.default_timeout)
        with self._one_at_a_time("update", deadline):
            links = self._living(self._chosen(None))
            if not self._scheme._groups.one:
                raise ValueError("update() writes one arena, and this scheme has several; send() writes them all")
            if not self.arenas.by_group:
                self.open()
            with self.arenas.by_group[ALL].update(timeout=timeout) as weights:
                yield weights
            writer_of(self.arenas.by_group[ALL]).wait_until_published(deadline_after(timeout, self.default_timeout))
            self.arenas.show()
            self._gather(self._announce(links), deadline_after(timeout, self.default_timeout))

    @override
    def find_source(self, weights: Any) -> Any:
        """As WeightSender.find_source(); without other weights the registered ones, or the Publisher's own."""
        found = super().find_source(weights)
        return self.arenas.source if found is None else found

    @override
    def _source(self, weights: Any) -> Any:
        # A user's subclass may prepare weights in its own way; else the engine reads a module faster than that.
        if self._scheme._prepares:
            return super()._source(weights)
        found = self.find_source(weights)
        return super()._source(None) if found is None else found  # or raise

    @override
    def _write(self, source: Any, links: Mapping[int, Link], deadline: float) -> None:
        arenas = self.arenas
        before = arenas.version
        if not (before or self._scheme.auto_register or arenas.registered is not None):
            known = sorted(name for name, each in self._scheme._arenas.items() if each.registered is not None)
            raise KeyError(
                f"{self._model_id!r} is not registered, only {known} are; call register_shared_weights(), or use "
                "auto_register=True"
            )
        version = self._next_version(links, before)
        arenas.publish(source, self._groups(links), version, len(self._links), deadline)
        self._show_weights()

    def _show_weights(self) -> None:
        """scheme.policy_weights has the newest version, where the user has no TensorDict of his own."""
        shown, arenas = self._scheme.policy_weights, self.arenas
        one_place = self._scheme.slots == 1 and len(arenas.by_group) == 1 and self._model_id in shown
        if arenas.registered is None and not one_place and (newest := arenas.newest) is not None:
            shown[self._model_id] = newest.arena.weights(newest.current[1], writable=True)

    @override
    def _announce(self, links: Mapping[int, Link], *, again: bool = False) -> Posted:
        tags: dict[int, Tag] = {}
        for publisher, members in self._by_arena(links):
            tag = self._model_id, publisher.version
            frame = messages.announcement(tag)
            self._tell(publisher, members, again=again)
            for index, link in members.items():
                link.post(frame, tag)
                tags[index] = tag
        return Posted(self.version, links, tags)

    @override
    def _gather(self, posted: Posted, deadline: float) -> None:
        try:
            super()._gather(posted, deadline)
        finally:
            outcome, arenas = posted.outcome, self.arenas
            arenas.in_use = arenas.in_use or bool(outcome.done or outcome.late)  # who is late applies it yet
            if outcome.failed and not arenas.in_use and arenas.give_up():
                self._scheme.policy_weights.pop(self._model_id, None)

    def _by_arena(self, links: Mapping[int, Link]) -> Iterator[tuple[Publisher, Mapping[int, Link]]]:
        """Each arena, with those of these workers that read it."""
        groups = self._scheme._groups
        for group, publisher in self.arenas.by_group.items():
            yield publisher, links if groups.one else {i: each for i, each in links.items() if groups.of(i) == group}

    def _tell(self, publisher: Publisher, links: Mapping[int, Link], *, again: bool = False) -> None:
        """Tell workers where their arena is, if they do not know, or `again`."""
        handle = publisher.handle
        for index, link in links.items():
            if again or link.registered.get(self._model_id) != handle:
                link.post(messages.registration(self._model_id, handle, index), (self._model_id, 0))
                link.registered[self._model_id] = handle


class SharedMemTransport(PipeTransport):
    """Weights in arenas, and small messages about them over pipes; see PipeTransport.

    One for all workers in the trainer, one in each worker, which sets `pipe`. Its arguments are those of
    SharedMemWeightSyncScheme. Without a pipe a send writes the arena alone, and nothing is received.
    """

    _scheme: SharedMemWeightSyncScheme

    def __init__(
        self,
        policy_weights: dict[str, TensorDictBase] | None = None,
        auto_register: bool = True,
        *,
        scheme: SharedMemWeightSyncScheme | None = None,
        pipe: Any = None,
        **options: Any,
    ) -> None:
        self._owns = scheme is None
        self._inbox: Inbox | None = None  # in a worker that has received
        if scheme is None:
            scheme = SharedMemWeightSyncScheme(policy_weights, auto_register=auto_register, **options)
        super().__init__(scheme, pipe)
        self.policy_weights = scheme.policy_weights

    def register_pipe(self, pipe: Any, worker_idx: int | None = None, process: Any = None) -> int:
        """Reach a worker over this pipe; the index it has from now on.

        Args:
            pipe: to the worker.
            worker_idx: its index; None: the one that it has, or the next one.
            process: as in WeightSender.register_worker().
        """
        links = self._scheme._links
        link = Link.of(pipe, process)
        if worker_idx is None:
            worker_idx = next((i for i, known in links.items() if known is link), max(links, default=-1) + 1)
        links[check_worker(worker_idx)] = link
        return worker_idx

    def register_weights(self, model_id: str, weights: Any) -> None:
        """As SharedMemWeightSyncScheme.register_shared_weights()."""
        self._scheme.register_shared_weights(model_id, weights)

    @override
    def _links(self) -> dict[int, Link]:
        if self.pipe is not None and not self._scheme._links:
            self.register_pipe(self.pipe)
        return self._scheme._links

    @override
    def _content(self, message: Message) -> TensorDictBase | None:
        """The zero-copy TensorDict of the version; protected only inside a read section."""
        self._inbox = Inbox.of(self.pipe)
        made = attached(self._inbox, message, self._scheme)
        return None if message.kind == messages.REGISTER else made.subscriber.weights

    def close(self) -> None:
        """End the arenas, or leave them. Idempotent."""
        with contextlib.ExitStack() as stack:
            if self._inbox is not None:
                for attachment in self._inbox.attachments.values():
                    stack.callback(attachment.close)
                self._inbox.attachments.clear()
            if self._owns:
                stack.callback(self._scheme.shutdown)
