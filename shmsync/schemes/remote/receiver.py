"""What a worker does with what a call of its sender brought: weights, or News of an arena of its node."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn
from typing_extensions import override

from ...engine.deadlines import timeout_or_none
from ..attachment import Attachment
from ..context import Arguments
from ..receiver import WeightReceiver
from .packing import Label, News

receivers: weakref.WeakSet[RemoteReceiver] = weakref.WeakSet()  # in this process, with a model


class RemoteReceiver(WeightReceiver):
    """Applies what a call brought: weights, which it copies, or News of this node's arena, to which it binds the model.

    Thread-safe: calls may come on any thread.
    """

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self._applying = threading.Lock()
        self._news = threading.Event()
        self._attachment = Attachment()  # to the arena of its node

    @override
    def _connect(self, arguments: Arguments) -> None:
        receivers.add(self)

    @property
    @override
    def version(self) -> int:
        """The version that the model uses now; 0: as it came. With fan_out="node" each forward uses the newest."""
        return self._attachment.version or self._version

    @override
    def apply_weights(self, weights: Any) -> None:
        """Make the model use weights that came from a sender; returns when it does.

        With fan_out="node" the model is bound to shared memory, and nothing is copied. Else the weights are copied in
        place, so no forward may run meanwhile.

        Raises ValueError for weights of another model, ManifestMismatch for weights that do not fit and for plain
        weights after the model was bound; the errors of Subscriber.
        """
        self._scheme.check_open("apply_weights")
        weights = self._own(weights)
        label: Label | None = getattr(weights, "label", None)  # of what a sender of ours sent
        if label is not None:
            self._own((label.model_id, None))  # raises for another model
        with self._applying:
            model = self._resolve_model_ref()
            if isinstance(weights, News):
                self._attachment.use(weights.handle, self._worker_idx, weights.label.version, self._scheme, model)
                if isinstance(model, nn.Module):
                    for path, state in weights.label.extra.items():
                        model.get_submodule(".".join(path)).set_extra_state(state)
            else:
                self._strategy.apply_weights(model, weights)
            self._version = self._version + 1 if label is None else label.version
        self._news.set()

    @override
    def receive(self, timeout: float | None = 0.001) -> bool:
        """Has a call brought weights since this was last asked? They are applied already.

        Args:
            timeout: seconds to wait for the next ones; 0 only looks, None is the scheme's.
        """
        self._scheme.check_open("receive")
        seconds = self._scheme.timeout if timeout_or_none(timeout) is None else timeout
        came = self._news.wait(min(seconds or 0.0, threading.TIMEOUT_MAX))
        if came:
            self._news.clear()
        return came

    @override
    def close(self) -> None:
        """Leave the arena; a bound module raises ClosedError when it is called from now on."""
        with self._applying:
            self._attachment.close()
