"""A trainer in a separate process, and its proxy in the test."""

from __future__ import annotations

import io
from functools import partial

import torch
from torch import distributed
from torch.distributed import rpc

from support.conformance.remote_peers import Collector


def _packed(value):
    """As bytes: the pipe's own pickles would share the memory of tensors. Tied tensors stay tied."""
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def _unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


# ---- in the trainer


def init_sender(state, key, scheme, model_id, given):
    """`given`: what init_on_sender() gets; a partial is a function of the state that makes it here."""
    given = {name: value(state) if isinstance(value, partial) else value for name, value in given.items()}
    scheme.init_on_sender(model_id, **given)
    vars(state).setdefault("schemes", {})[key] = scheme


def infos(ranks, model_id, state):
    state.infos = vars(state).get("infos", {})
    state.infos[model_id] = [rpc.get_worker_info(f"rank{rank}") for rank in ranks]
    return state.infos[model_id]


def rrefs(ranks, model_id, state):
    state.rrefs = vars(state).get("rrefs", {})
    state.rrefs[model_id] = [_collector(rank, model_id) for rank in ranks]
    return state.rrefs[model_id]


def _collector(rank, model_id):
    return rpc.remote(f"rank{rank}", Collector, args=(model_id,))


def change_roster(state, model_id, index, rank):
    state.infos[model_id][index] = rpc.get_worker_info(f"rank{rank}")
    state.rrefs[model_id][index] = _collector(rank, model_id)


def store(number, state):
    return distributed.PrefixStore(f"test{number}", state.store)


def register_rank(state, key, index, rank, number):
    state.schemes[key].get_sender().register_worker(index, (store(number, state), rank))


def use_sender(state, key, name, packed):
    """Call a method of the sender, or get an attribute: does it return, what, and the cause of what it raises."""
    try:
        found = getattr(state.schemes[key].get_sender(), name)
        if packed is not None:
            args, kwargs = _unpacked(packed)
            found = found(*args, **kwargs)
        return True, found, None
    except Exception as error:
        return False, error, error.__cause__


def shut_down(state, key):
    if key in vars(state).get("schemes", {}):
        state.schemes.pop(key).shutdown()


# ---- in the test


class Remote:
    """A scheme whose sender is in a trainer's process."""

    _keys = iter(range(10**9))

    def __init__(self, scheme, trainer):
        self.scheme = scheme
        self.trainer = trainer
        self.key = next(self._keys)
        self._sender = None

    def init_on_sender(self, model_id, **given):
        self.trainer.call(init_sender, self.key, self.scheme, model_id, given)
        self._sender = Sender(self.trainer, self.key)

    def get_sender(self):
        return self._sender

    def shutdown(self):
        self.trainer.call(shut_down, self.key)

    def __reduce__(self):
        return _same, (self.scheme,)  # to a worker goes the scheme itself


def _same(scheme):
    return scheme


class Sender:
    """Passes everything on to the trainer's sender."""

    def __init__(self, trainer, key):
        self._trainer = trainer
        self.key = key

    def _use(self, name, packed=None):
        returned, value, cause = self._trainer.call(use_sender, self.key, name, packed)
        if not returned:
            raise value from cause
        return value

    def _method(self, name):
        return lambda *args, **kwargs: self._use(name, _packed((args, kwargs)))

    def __getattr__(self, name):
        if name in ("version", "worker_ids", "model_id"):
            return self._use(name)
        if name in ("send", "send_async", "wait_async", "update_weights", "is_dead"):
            return self._method(name)
        raise AttributeError(name)
