"""Where a rank can be reached: the one key that it writes into the store of torch.distributed, and who reads it.

    NODE_{rank}_address   JSON: host and port, the secret that both ends of a connection have to prove (link/proved.py),
                          and the location

INV: no request waits for a key. A get() of a missing key would, and would lock the store meanwhile.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import reprlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from ....errors import ProtocolError, WriterDied
from ...link.proved import PROOF
from ...link.serial_executor import SerialExecutor, Task
from ...link.timed_queue import TimedQueue
from ..location import Address, Location, host_towards

_ABSENT = "(not set)"
_FIRST, _LAST = 0.0005, 0.02  # seconds between two looks for a rank: short at first


def write_address(store: Any, rank: int, address: Address) -> None:
    """In the worker: write where the rank can be reached."""
    store.set(_key(rank), json.dumps([address.host, address.port, address.secret.hex(), address.location]))


def read_address(store: Any, rank: int) -> Address | None:
    """Where a rank can be reached; None when no worker has written it. Raises ProtocolError for what none writes."""
    found = bytes(store.compare_set(_key(rank), _ABSENT, _ABSENT))
    if found == _ABSENT.encode():
        return None
    try:
        host, port, secret, location = json.loads(found)
        address = Address(str(ipaddress.ip_address(host)), port, bytes.fromhex(secret), Location(*location))
        kinds = [type(each) for each in (port, *address.location)]
        if kinds != [int, str, str, int, int, int] or len(address.secret) != PROOF:
            raise ValueError("of another form")
        if not (0 < port < 1 << 16 and 0 <= address.location.owner < 1 << 64):
            raise ValueError("with a number out of range")
        return address
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"the store of torch.distributed has under {_key(rank)!r} {reprlib.repr(found)}, which no worker of this "
            f"scheme wrote ({str(error)[:200]}); see who else uses this key, and run the same shmsync on all ranks"
        ) from None


def _key(rank: int) -> str:
    return f"NODE_{rank}_address"


def own_host(store: Any) -> str:
    """The address under which other ranks reach this process."""
    root = _root(store)
    return "127.0.0.1" if isinstance(root, torch.distributed.HashStore) else host_towards(getattr(root, "host", ""))


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """In the worker: a store that cannot be reached means that no sender will come."""
    try:
        yield
    except torch.distributed.DistError as error:
        raise WriterDied(f"the store cannot be reached any more: {str(error)[:200]}") from error


class StoreThread(SerialExecutor):
    """The thread that makes the requests to one store, which a stopped host never answers, and looks for ranks there.

    It is handed tasks, and weak references to RankEnds that look for their rank: it calls seek() until that is True.
    Handlers of signals run on the main thread alone, so no interrupt lands in the middle of a task. It ends, after the
    tasks that it has, when no RankEnd refers to it any more.
    """

    @staticmethod
    @override
    def work(items: TimedQueue[Any]) -> None:
        seekers: list[weakref.ref[Any]] = []
        pause = _FIRST
        while True:
            item: Any = ()
            with contextlib.suppress(queue.Empty):
                item = items.get(pause if seekers else None)
            if item is None:
                return
            if isinstance(item, Task):
                item.run()
            elif item:
                seekers.append(item)
                pause = _FIRST
            item = None  # what it refers to is not to live until the next one comes
            if items.empty():
                seekers = [each for each in seekers if (seeker := each()) is not None and not seeker.seek()]
                seeker = None
                pause = min(pause * 1.5, _LAST)


_threads: weakref.WeakValueDictionary[int, StoreThread] = weakref.WeakValueDictionary()  # by the id of the store
_threads_lock = threading.Lock()


def _forget_threads() -> None:
    """In a forked child: it has none of them, and its locks may be taken for good."""
    global _threads_lock
    _threads_lock = threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)


def thread_of(store: Any) -> StoreThread:
    """That of a store, and of all prefixes in it: its requests take turns anyway."""
    with _threads_lock:
        key = id(_root(store))
        found = _threads.get(key)
        if found is None:
            found = _threads[key] = StoreThread()
        return found


def _root(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
