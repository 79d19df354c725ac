"""A thread that makes all requests to one store, so that no other thread waits for the store's host.

A request to a store whose host is stopped does not return, and no time-out of the store's own helps: it writes to
stderr, and the store is locked meanwhile. So a call asks the courier and waits for it as long as it likes, and Ctrl-C
never lands between two requests that belong together.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from typing_extensions import Self, override

from ....errors import ProtocolError
from ...link.serial_executor import SerialExecutor, Task
from ...link.timed_queue import TimedQueue
from ..remote_requests import Call

_FIRST, _LAST = 0.00005, 0.0005  # seconds between two looks: short at first
_LONGER = 0.1  # seconds that the courier looks on when a wait has ended: the next one may begin at once
_A_LOOK = 0.08  # seconds that a caller that does not wait gives the courier, unless it is known to be kept by the store


class Courier(SerialExecutor):
    """The thread. Beside tasks it takes calls, and looks at them until each is finished, or its time is over."""

    def __init__(self, store: Any = None) -> None:
        super().__init__()
        self.store = store
        self._late: Task | None = None  # it did not return in time
        self._users = 0
        self._users_lock = threading.Lock()

    def join(self) -> Courier:
        """Add a user."""
        with self._users_lock:
            self._users += 1
        return self

    def leave(self) -> None:
        """End the thread when the last one leaves."""
        with self._users_lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    def soon(self, function: Callable[[], Any]) -> Task:
        """Do this, and wait for it no longer than a moment."""
        kept = self._late is not None and not self._late.done()
        task = self.give(function)
        if not kept and not task.done_by(time.monotonic() + _A_LOOK):
            self._late = task
        return task

    def attend(self, calls: Collection[StoreCall], until: float) -> None:
        """Look at these calls, at least once and then until that time. Each that ends then rings its bell."""
        self.put((list(calls), until))

    @staticmethod
    @override
    def work(items: TimedQueue[Any]) -> None:
        watched: dict[StoreCall, float] = {}
        pause = _FIRST
        while True:
            item: Any = ()
            with contextlib.suppress(queue.Empty):
                item = items.get(pause if watched else None)
            if item is None:
                break
            if isinstance(item, Task):
                item.run()
            elif item:
                watched.update(dict.fromkeys(*item))
                pause = _FIRST
            if not items.empty():
                continue
            now = time.monotonic()
            for call, until in list(watched.items()):
                if call.look() or until <= now:
                    del watched[call]
                    call.ring()
            # What these refer to is not to live until the next item comes.
            item = call = None  # type: ignore[assignment]
            pause = min(pause * 1.5, _LAST)
        for call in watched:
            call.ring()


class StoreCall(Call):
    """Something that the courier looks for in the store."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._finished = False
        self._trouble: BaseException | None = None
        self._until = 0.0  # when the courier stops looking by itself
        self._looking: Task | None = None
        self._bell: TimedQueue[None] | None = None

    @abstractmethod
    def try_once(self) -> bool:
        """On the courier's thread: is it finished now? What it raises is the result."""

    @abstractmethod
    def answer(self) -> Any:
        """The result, once try_once() was True."""

    def look(self) -> bool:
        """On the courier's thread: is it finished now?"""
        if not self._finished:
            try:
                self._finished = self.try_once()
            except torch.distributed.DistError as error:
                self._trouble = ProtocolError(
                    f"the store of torch.distributed cannot be reached: {str(error)[:200]}; make a process group and a "
                    "scheme anew"
                )
                self._trouble.__cause__ = error
                self._finished = True
            except BaseException as error:
                self._trouble = error
                self._finished = True
        return self._finished

    def ring(self) -> None:
        """On the courier's thread: wake who waits."""
        bell = self._bell
        if bell is not None:
            bell.put(None)

    def begin(self) -> Self:
        """Let the courier look for the first time."""
        self._courier.soon(self.look)
        self.listen(self._bell, time.monotonic() + _LONGER)
        self._courier.attend([self], self._until)
        return self

    def listen(self, bell: TimedQueue[None] | None, until: float) -> None:
        """Ring this bell when it is finished, or when it is given up."""
        self._until = max(self._until, until)
        self._bell = bell

    @override
    def finished(self) -> bool:
        if not self._finished and time.monotonic() > self._until:  # no call waits: has it arrived meanwhile?
            looking = self._looking
            if looking is None or looking.done():
                self._looking = self._courier.soon(self.look)
        return self._finished

    @override
    def result(self) -> Any:
        if self._trouble is not None:
            raise self._trouble
        return self.answer()

    @property
    def courier(self) -> Courier:
        """Who looks for it."""
        return self._courier


def wait_for(calls: Iterable[Call], seconds: float) -> None:
    """Return when one of these calls is finished, or after `seconds`."""
    calls = list(calls)
    bell: TimedQueue[None] = TimedQueue()
    end = time.monotonic() + seconds
    by_courier: dict[Courier, list[StoreCall]] = {}
    for call in calls:
        if isinstance(call, StoreCall):
            call.listen(bell, end + _LONGER)
            by_courier.setdefault(call.courier, []).append(call)
    for courier, group in by_courier.items():
        courier.attend(group, end + _LONGER)
    if not any(call.finished() for call in calls):
        with contextlib.suppress(queue.Empty):
            bell.get(end - time.monotonic())


_couriers: weakref.WeakValueDictionary[int, Courier] = weakref.WeakValueDictionary()  # by the id of the store they keep
_couriers_lock = threading.Lock()


def courier_of(store: Any) -> Courier:
    """The courier of a store, and of all prefixes in it: its requests take turns anyway."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with _couriers_lock:
        found = _couriers.get(id(store))
        if found is None:
            found = _couriers[id(store)] = Courier(store)
        return found
