"""Weights through the pipe: a private copy for every worker. The simplest scheme, and the slowest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from ...engine.deadlines import check_worker, deadline_after, timeout_or_default
from ...engine.outcome import Outcome
from ...engine.source.dtypes import Dtypes
from ...errors import ProtocolError
from ..api import WeightSyncScheme
from ..arenas.publishers import Plan
from ..arenas.worker_devices import DeviceChoice, WorkerDevices, check_lies_on, devices_for
from ..context_args import Arguments
from ..link import messages
from ..link.messages import Message, Tag
from ..link.sender_end import Link
from ..sent_leaves import SentLeaves, private_leaves
from ..strategy import Form, WeightStrategy, leaves_of, refuse_odd
from .pipe_carrier import PipeCarrier, Posted
from .pipe_receiver import PipeReceiver
from .pipe_sender import PipeSender
from .pipe_transport import PipeTransport
from .weights_message import LARGE, Unreadable, WeightsMessage


@dataclass(eq=False)
class _Sent:
    """What was sent of one model."""

    version: int = 0
    newest: tuple[int, WeightsMessage] | None = None  # what resend() brings: a version, and its message
    before: tuple[int, WeightsMessage] | None = None  # the same before the last send, while that is under way
    leaves: SentLeaves = field(default_factory=SentLeaves)  # with partial=True: what resend() brings


class MultiProcessCarrier(PipeCarrier):
    """The weights themselves go through the pipes; pickled once for all workers."""

    def __init__(self, *, partial: bool = False, devices: WorkerDevices | None = None) -> None:
        super().__init__()
        self._devices = WorkerDevices(None) if devices is None else devices
        self._partial = partial
        self._in_use: list[tuple[Link, Tag, WeightsMessage]] = []  # unanswered, in memory of this process
        self._sent: dict[str, _Sent] = {}  # by model

    @override
    def add(self, index: int, pipe: Any, process: Any = None) -> None:
        self._devices.of(index)
        super().add(index, pipe, process)

    @override
    def version(self, model_id: str) -> int:
        sent = self._sent.get(model_id)  # a look makes nothing: it holds no lock
        return 0 if sent is None else sent.version

    def _sent_of(self, model_id: str) -> _Sent:
        return self._sent.get(model_id) or self._sent.setdefault(model_id, _Sent())

    @override
    def plan(self, model_id: str, weights: Any, links: Mapping[int, Link], version: int) -> Plan:
        if not isinstance(weights, (TensorDictBase, Mapping)):
            raise ValueError(f"weights are a torch.nn.Module, a TensorDict or a dict, not a {type(weights).__name__}")
        leaves, _ = leaves_of(weights)
        refuse_odd({key: leaf for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)})
        self._release()
        size = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, torch.Tensor))
        apart = size >= LARGE and any(link.end.reaches for link in links.values())
        message = WeightsMessage(Tag(model_id, version), weights, apart=apart)
        sent = self._sent_of(model_id)
        whole = sent.leaves.with_part(private_leaves(weights)) if self._partial else {}

        def accept() -> None:
            sent.before, sent.newest = sent.newest, (version, message)
            sent.leaves.accept(whole)
            sent.version = version

        return Plan([], accept, lambda: None)

    @override
    def announce(self, model_id: str, links: Mapping[int, Link], *, again: bool = False) -> dict[int, list[Tag]]:
        sent = self._sent_of(model_id)
        if sent.newest is None:
            raise ProtocolError(
                f"there are no weights of {model_id!r} to bring: the workers refused version "
                f"{sent.version}, and have applied none before it. Send others"
            )
        version, message = sent.newest
        tag = Tag(model_id, version)
        if again and self._partial:
            message = WeightsMessage(tag, sent.leaves.whole)
        for link in links.values():
            link.end.announcers[model_id] = self.sign
            # Newer weights take the place of a message that has not left, but a part does not replace another one.
            link.end.send(self._payload(message, link, tag), tag, replaceable=not self._partial)
        return {index: [tag] for index in links}

    def _payload(self, message: WeightsMessage, link: Link, tag: Tag) -> bytes:
        """The message itself, or one that leads to it: never two of these at once, so a late worker holds up one."""
        if not (message.is_apart and link.end.reaches and link.end.all_answered(tag.model_id)):
            return message.by_value()
        self._in_use.append((link, tag, message))  # before it is sent: an interrupt may come
        return message.reference()

    def _release(self) -> None:
        """Drop weights that no worker can still ask for."""
        self._in_use = [each for each in self._in_use if each[0].end.expects(each[1]) and not each[0].reported]

    @override
    def mark(self, posted: Posted, outcome: Outcome) -> None:
        self._release()
        sent = self._sent_of(posted.model_id)
        if posted.version == sent.version:
            if outcome.failed and not outcome.done:  # all that answered refused it: resend() brings it to nobody
                sent.newest = sent.before
            sent.before = sent.newest
            sent.leaves.settle(outcome)
        super().mark(posted, outcome)


class MPTransport(PipeTransport):
    """Weights through one pipe, in either direction; see PipeTransport.

    Args:
        pipe_connection: one end of a duplex multiprocessing.Pipe; None makes a transport without a worker.
        timeout: seconds to wait for an answer; math.inf waits without limit, None is 10.
    """

    def __init__(self, pipe_connection: Any, timeout: float | None = None) -> None:
        super().__init__(pipe_connection, timeout, MultiProcessCarrier())

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        """In the worker: the next (model_id, weights) of any model; None if none came. send_ack() answers."""
        deadline = deadline_after(timeout, self.timeout)
        message = self.end.take((messages.UPDATE,), deadline)
        if message is not None and isinstance(message.content, Unreadable):
            self.end.fail(message, message.content.error)
            raise message.content.error
        return None if message is None else (message.model_id, message.content)


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights are copied through a pipe to each worker, which applies them at its receive().

    Args:
        strategy: the form in which weights travel, "state_dict" or "tensordict".
        timeout: default of a send, in seconds; math.inf waits without limit, None is 10.
        partial: see WeightSyncScheme.
        dtype: see WeightSyncScheme.
        device: where the workers' modules lie: one device for all, or a list or tuple with one for each worker, None
            for the host's memory. What travels is fetched from the trainer's device once, and each worker copies it to
            its own. A worker whose module lies on another kind of device is refused. None: wherever they lie.
    """

    sender_takes = WeightSyncScheme.sender_takes | {"procs", "device"}

    def __init__(
        self,
        strategy: Form = "state_dict",
        *,
        timeout: float | None = None,
        partial: bool = False,
        dtype: Dtypes = None,
        device: DeviceChoice = None,
    ) -> None:
        super().__init__(strategy, partial=partial, dtype=dtype)
        self.timeout = timeout_or_default(timeout)
        self.device = device
        self.worker_devices = WorkerDevices(device)

    @override
    def create_transport(self, pipe_or_context: Any) -> MPTransport:
        return MPTransport(getattr(pipe_or_context, "pipe", pipe_or_context), self.timeout)

    @override
    def create_sender(self) -> PipeSender:
        return MultiProcessSender(self)

    @override
    def create_receiver(self) -> PipeReceiver:
        return MultiProcessReceiver(self)

    def create_carrier(self) -> MultiProcessCarrier:
        """What a new sender sends with."""
        return MultiProcessCarrier(partial=self.partial, devices=self.worker_devices)


class MultiProcessSender(PipeSender):
    """Sends weights through the pipes."""

    @override
    def set_up(self, arguments: Arguments) -> None:
        """Refuse devices that are not the scheme's, or are those of another number of workers."""
        given, own = devices_for(arguments.given("device")), self._scheme.worker_devices
        own.check_same(given)
        for devices in (given, own):
            devices.check_workers(len(arguments.needed("pipes")))
        super().set_up(arguments)


class MultiProcessReceiver(PipeReceiver):
    """Copies weights that came through the pipe into the model."""

    @override
    def set_up(self, arguments: Arguments) -> None:
        """Refuse a model that lies on another kind of device than the scheme says."""
        devices, worker, model = self._scheme.worker_devices, arguments.get("worker_idx"), arguments.model()
        if isinstance(model, nn.Module) and (worker is not None or devices.workers is None):
            check_lies_on(model, devices.of(0 if worker is None else check_worker(worker)))
        super().set_up(arguments)

    @override
    def _checked(self, message: Message) -> Callable[[], None]:
        if isinstance(message.content, Unreadable):
            raise message.content.error
        model = self._resolve_model_ref()
        fit = self._strategy.check_weights(model, message.content)

        def apply() -> None:
            if type(self._strategy) is WeightStrategy:
                self._strategy.apply_checked(fit)
            else:  # a user's own applies weights in its own way
                self._strategy.apply_weights(model, message.content)
            if message.tag is not None:
                self._version = message.tag.version

        return apply
