"""Weights in shared memory: written once, read by every worker without a copy. The engine behind the schemes' API.

A send publishes the weights in the arena (arenas.py) and posts the number of their version to each worker, which
answers when it uses that version (links.py). A worker is told of the arena before its first version.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from ..engine.bind.binding import ModuleCheck
from ..engine.bind.guard import bind
from ..engine.bind.guarded_methods import can_be_called
from ..engine.deadlines import check_worker, deadline_after, timeout_or_default
from ..engine.publisher import Publisher, writer_of
from ..engine.source.dtypes import Dtypes
from ..engine.subscriber import Consistency, Subscriber, reader_of
from ..errors import ManifestMismatch, ProtocolError
from ..memory.segment import Handle
from ..workers.pipe import framed
from . import messages
from .api import WeightSyncScheme
from .arenas import ALL, ArenaOptions, Arenas
from .context import Arguments
from .devices import DeviceChoice, WorkerDevices, devices_for, lies_elsewhere
from .links import Link
from .messages import Message, Tag
from .receiver import PipeReceiver
from .sender import PipeSender, Posted
from .strategy import Form, WeightStrategy, leaves_of
from .transports import PipeTransport


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
        device: where the weights lie: "cpu", as with None, or a device that all workers see, as "cuda:0". A list or
            tuple names the device of each worker, None for the host's memory: each device has one arena, which all
            workers on it share. A worker's module on another device gets a private copy of each version.
        partial: see WeightSyncScheme. The first weights that are sent make the arena; with partial=True the worker's
            module may have other leaves besides, which stay its own. Leaves that a send lacks keep the values of the
            newest version.
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
        device: DeviceChoice = None,
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
        self.device = device
        self._devices = WorkerDevices(device)
        self._start(publisher)

    def _start(self, publisher: Publisher | None) -> None:
        options = ArenaOptions(self.slots, self.timeout, self.groups, self.partial, self.dtype)
        self._arenas = Arenas(options, self._devices, publisher)
        self._links: dict[int, Link] = {}  # all models have the same workers
        self._subscriptions = Subscriptions(consistency=self.consistency, timeout=self.timeout, partial=self.partial)
        for model_id, weights in self.policy_weights.items():
            self._arenas.register(model_id, weights)

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Make this TensorDict the first version of a model, and let it show each later one.

        With slots=1 and one arena its leaves are moved into the arena: it is no second copy, and send() without other
        weights copies nothing. Leaves whose memory other tensors show stay where they are, with a warning, and each
        send copies them; so do all leaves with more slots, groups, dtype= or device=. Known workers are told at once.

        Raises RuntimeError when the model is registered, ValueError for weights that are not a TensorDict.
        """
        self.check_open("register_shared_weights")
        self._arenas.register(model_id, weights)
        self.policy_weights[model_id] = weights
        if self._sender is not None and self._sender.model_id == model_id and self._links:
            sender = self._sender
            assert isinstance(sender, SharedMemSender)
            sender.open()

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
        try:
            self._arenas.close()
        finally:
            self._subscriptions.close()

    def __getstate__(self) -> dict[str, Any]:
        # Workers stay here. Of the weights only those go along that the user registered: the others are sent.
        state = {**super().__getstate__(), "policy_weights": dict(self._arenas.registered)}
        return {name: value for name, value in state.items() if name not in ("_arenas", "_links", "_subscriptions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start(None)


class SharedMemSender(PipeSender):
    """Writes weights into the arenas of its scheme, and posts the number of their version."""

    _scheme: SharedMemWeightSyncScheme

    @override
    def _start_here(self) -> None:
        super()._start_here()
        self.arenas: Arenas = self._scheme._arenas
        self.links = self._scheme._links
        self._without_state: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have no extra state

    @property
    @override
    def version(self) -> int:
        return self.arenas.version(self._model_id)

    @override
    def set_up(self, arguments: Arguments) -> None:
        """Take in the model and the workers; weights that are registered already go to these."""
        pipes = arguments.needed("pipes")
        devices = devices_for(arguments.given("device"))
        for each in (devices, self.arenas.devices):
            each.check_workers(len(pipes))
        self.arenas.place(devices)
        for index in [index for index in self.links if index >= len(pipes)]:
            del self.links[index]
        super().set_up(arguments)
        self.arenas.use_given(self._model_id)
        if self._model_id in self.arenas.registered and self.links:
            self.open()

    @override
    def _register_worker(self, worker_idx: int, pipe_or_context: Any, process: Any = None) -> None:
        self.arenas.group_of(worker_idx)  # or raise
        super()._register_worker(worker_idx, pipe_or_context, process)

    def open(self) -> None:
        """Make the arena of the registered weights, or of those that are known, and tell the workers where it is."""
        source = self.arenas.registered.get(self._model_id)
        source = self.find_source(None) if source is None else source
        if source is None:
            raise ValueError(f"there are no weights of {self._model_id!r} yet; give init_on_sender() model=, or send()")
        groups = self.arenas.groups_of(self.links, self.links) if self.links else [ALL]
        version = self._next_version(self.links, self.version)
        self.arenas.open(self._model_id, source, groups, version, len(self.links))
        self._show_weights()
        for index, link in self.links.items():
            self._tell(index, link, self.arenas.of_worker(self._model_id, index).handle)

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
            links = self._living(self._chosen(None), self.links)
            if self.arenas.is_split:
                raise ValueError("update() writes one arena, and this scheme has several; send() writes them all")
            if self.arenas.only(self._model_id) is None:
                self.open()
            publisher = self.arenas.only(self._model_id)
            assert publisher is not None
            with publisher.update(timeout=timeout) as weights:
                yield weights
            self.arenas.show(self._model_id, publisher)
            self._gather(self._announce(links), deadline_after(timeout, self.default_timeout))

    @override
    def find_source(self, weights: Any) -> Any:
        """As WeightSender.find_source(); without other weights the registered ones."""
        found = super().find_source(weights)
        return self.arenas.registered.get(self._model_id) if found is None else found

    @override
    def connect(self, weights: Any) -> None:
        """Send the first weights; those of a Publisher of the user's own are there already."""
        if weights is None and self.find_source(None) is None and self.arenas.use_given(self._model_id):
            self.resend()
        else:
            super().connect(weights)

    @override
    def _source(self, weights: Any) -> Any:
        # A user's subclass may prepare weights in its own way; else the engine reads a module faster than that.
        if self._scheme._prepares:
            return super()._source(weights)
        found = self.find_source(weights)
        if found is None and not self.arenas.use_given(self._model_id):
            return super()._source(None)  # raises
        return found

    @override
    def _write(self, source: Any, links: Mapping[int, Link], deadline: float) -> None:
        model_id, arenas = self._model_id, self.arenas
        if not (self._scheme.auto_register or model_id in arenas.registered or self.version):
            known = sorted({*arenas.registered, *arenas.made})
            raise KeyError(
                f"{model_id!r} is not registered, only {known} are; call register_shared_weights(), or use "
                "auto_register=True"
            )
        if source is not None:
            self._refuse_extra_state(source)
        groups = arenas.groups_of(links, [index for index, link in self.links.items() if not link.reported])
        version = self._next_version(links, self.version)
        arenas.publish(model_id, source, groups if self.links else [ALL], version, len(self.links), deadline)
        self._show_weights()

    def _show_weights(self) -> None:
        """scheme.policy_weights has the newest version, where the user has no TensorDict of his own."""
        if self._model_id not in self.arenas.registered and self.arenas.made.get(self._model_id):
            writer = writer_of(next(iter(self.arenas.made[self._model_id].values())))
            slot = writer.current[1]
            self._scheme.policy_weights[self._model_id] = writer.arena.weights(slot, writable=True)

    def _refuse_extra_state(self, source: Any) -> None:
        """Raise ManifestMismatch for weights with extra state, which is no tensor; a module is looked at once."""
        if isinstance(source, TensorDictBase) or (isinstance(source, nn.Module) and source in self._without_state):
            return
        if isinstance(source, Mapping) and self.version:  # the engine refuses a key that the arena does not have
            return
        _, states = leaves_of(source)
        if states:
            whose = ", ".join(".".join(path) if path else "the model itself" for path in states)
            raise ManifestMismatch(
                f"{self._model_id!r} has extra state (get_extra_state() of {whose}), which shared memory does not "
                "carry; nothing was sent. Keep it in buffers, or use MultiProcessWeightSyncScheme"
            )
        if isinstance(source, nn.Module):
            self._without_state.add(source)

    @override
    def _announce(self, links: Mapping[int, Link], *, again: bool = False) -> Posted:
        tags: dict[int, Tag] = {}
        made: dict[int, tuple[Handle, Tag, bytes]] = {}  # by group
        for index, link in links.items():
            group = self.arenas.group_of(index)
            if group not in made:
                publisher = self.arenas.of_worker(self._model_id, index)
                tag = Tag(self._model_id, publisher.version)
                made[group] = publisher.handle, tag, framed(messages.version_message(*tag))
            handle, tags[index], frame = made[group]
            self._tell(index, link, handle, again=again)
            link.post(frame, tags[index])
        return Posted(self.version, links, tags)

    def _tell(self, index: int, link: Link, handle: Handle, *, again: bool = False) -> None:
        """Tell a worker where the arena is, if it has not been told of this one."""
        if again or link.registered.get(self._model_id) != handle:
            frame = framed(messages.registration(self._model_id, handle, index))
            link.post(frame, Tag(self._model_id, 0))
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
        subscriptions = self._scheme._subscriptions
        if message.kind == messages.REGISTER:
            subscriptions.join(message.model_id, message.content.handle, message.worker)
            return None
        return subscriptions.moved_to(message.model_id, message.content).weights

    def close(self) -> None:
        """End the arenas, or leave them. Idempotent."""
        if self._owns:
            self._scheme.shutdown()


class Subscriptions:
    """A worker's subscribers by model id, and the modules that are bound to them."""

    def __init__(self, *, consistency: Consistency, timeout: float, partial: bool = False) -> None:
        self._consistency: Consistency = consistency
        self._timeout = timeout
        self._strategy = WeightStrategy(partial=partial)
        self._handles: dict[str, tuple[Handle, int | None]] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._bound: dict[str, weakref.ref[nn.Module]] = {}
        # A scheme of this shape has no close(), so collecting it is the normal end, and no reason to warn.
        self._finalizer = weakref.finalize(self, _close_unused, self._subscribers, self._bound)
        self._finalizer.atexit = False  # the subscribers end by themselves then

    def join(self, model_id: str, handle: Handle, worker: int | None) -> None:
        """Attach to an arena, in place of the model's earlier one, as the worker of this index."""
        self._handles[model_id] = handle, worker
        subscriber = Subscriber(handle, consistency=self._consistency, worker=worker, timeout=self._timeout)
        earlier = self._subscribers.pop(model_id, None)
        self._bound.pop(model_id, None)
        self._subscribers[model_id] = subscriber
        if earlier is not None:
            earlier.close()

    def get(self, model_id: str) -> Subscriber | None:
        """The subscriber of a model, if it has one."""
        return self._subscribers.get(model_id)

    def needed(self, model_id: str) -> Subscriber:
        """The subscriber of a registered model. Attaches again if an earlier attempt failed.

        Raises ProtocolError for a model that was never registered.
        """
        if model_id not in self._subscribers:
            if model_id not in self._handles:
                raise ProtocolError(
                    f"{model_id!r} was never registered here; keep one receiver for each model, and let it see every "
                    "message of the pipe"
                )
            self.join(model_id, *self._handles[model_id])
        return self._subscribers[model_id]

    def moved_to(self, model_id: str, version: int) -> Subscriber:
        """The subscriber, at this version or a later one. Raises ProtocolError if the arena does not have it."""
        subscriber = self.needed(model_id)
        if reader_of(subscriber).arena.on_device is not None:
            subscriber.wait_version(version, self._timeout)  # it is announced when its copy begins
        subscriber.refresh()
        applied = reader_of(subscriber).applied_version
        if applied < version:
            raise ProtocolError(
                f"{model_id!r} is at version {applied} in the arena that this worker knows, not at {version}; was the "
                "scheme restarted? Make a new receiver",
                version=version,
            )
        return subscriber

    def bind(self, model_id: str, model: Any) -> None:
        """Let the model use the arena: a module for good, anything else gets a copy of this version."""
        subscriber = self.needed(model_id)
        if not isinstance(model, nn.Module):
            with subscriber.read() as section:
                self._strategy.apply_weights(model, section.weights)
        elif (bound := self._bound.get(model_id)) is None or bound() is not model:
            reader = reader_of(subscriber)
            check = ModuleCheck(reader.arena, reader.name, copies=lies_elsewhere(model, reader.arena.device))
            bind(reader, model, can_be_called(model), check, clones=True)
            self._bound[model_id] = weakref.ref(model)

    def close(self) -> None:
        """Leave every arena; bound modules raise ClosedError from now on. Idempotent.

        Raises WriterBusy for an arena that another thread reads; call it again then.
        """
        self._bound.clear()
        _close_unused(self._subscribers, self._bound)


def _close_unused(subscribers: dict[str, Subscriber], bound: dict[str, weakref.ref[nn.Module]]) -> None:
    with contextlib.ExitStack() as stack:  # one that is busy keeps none of the others, and is closed by the next call
        for model_id, subscriber in subscribers.items():
            module = bound.get(model_id)
            if module is None or module() is None:  # else its guard keeps the subscriber, and needs it
                stack.callback(subscriber.close)
    subscribers.clear()


class SharedMemReceiver(PipeReceiver):
    """Binds the model to the arena, and moves it to each version that is announced.

    The module is bound at the first receive(). From then on each forward uses the newest version.
    """

    _scheme: SharedMemWeightSyncScheme

    @property
    def _subscriptions(self) -> Subscriptions:
        return self._scheme._subscriptions

    @property
    @override
    def version(self) -> int:
        """The version of the calling thread's last forward or receive(), whichever came last; else the applied one.

        Each forward uses the newest, so it may move on between two calls of receive().
        """
        subscriber = self._subscriptions.get(self._model_id)
        return subscriber.version if subscriber else 0

    @override
    def _ready(self) -> bool:
        """Not inside a read section of this thread: the version could not change there."""
        subscriber = self._subscriptions.get(self._model_id)
        return subscriber is None or not reader_of(subscriber).in_section

    @override
    def _use(self, message: Message) -> None:
        subscriptions, content = self._subscriptions, message.content
        if message.kind == messages.REGISTER:
            worker = self._worker_idx if message.worker is None else message.worker
            subscriptions.join(self._model_id, content.handle, worker)
        elif type(content) is int:
            subscriptions.moved_to(self._model_id, content)
        else:
            raise ValueError(f"weights of {self._model_id!r} came through the pipe; use this scheme on both sides")
        subscriptions.bind(self._model_id, self._resolve_model_ref())

    @override
    def _use_news(self) -> None:
        subscriber = self._subscriptions.get(self._model_id)
        if subscriber is not None:
            reader_of(subscriber).use_applied_version()

    @override
    def close(self) -> None:
        """Leave the arenas; a bound model raises ClosedError when it is called from now on."""
        self._subscriptions.close()
