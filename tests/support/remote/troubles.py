"""What processes do in test_remote_recovery.py: things that only go wrong at the wrong moment."""

from __future__ import annotations

import math
import os
import signal

from torch import nn

from shmsync import WeightStrategy
from shmsync.schemes.link.serial_executor import Task
from shmsync.schemes.remote.distributed.distributed_scheme import DistributedCarrier, DistributedTransport
from shmsync.schemes.remote.distributed.rank_inbox import Inbox
from shmsync.schemes.remote.packed_weights import Announcement, Stamp
from shmsync.schemes.remote.rpc.rpc_scheme import RPCTransport
from support.processes import wait_until_dead
from support.remote.members import Trouble
from support.weights import fill


def leave_a_version(state, value):
    """The state after a send that was interrupted when its weights were published here, and before any worker knew."""
    fill(state.model, value)
    sender = state.sender
    stamp = Stamp(sender._packer.session, "policy", sender.version + 1)
    sender._fan_out._local.publish_as(stamp, state.model.state_dict(), math.inf)


def kill_before_the_announcements(state, pid, stop=None):
    """A relay that dies when it has answered, and no other worker has attached to its arena. `stop`: another one."""
    for transport in (DistributedTransport, RPCTransport):
        transport.post = _killing(transport.post, pid, stop)


def _killing(post, pid, stop):
    def wrapped(self, payload, *args, **kwargs):
        nonlocal pid
        if isinstance(payload, Announcement) and pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_until_dead(pid)
            pid = None
            if stop is not None:
                os.kill(stop, signal.SIGSTOP)
        return post(self, payload, *args, **kwargs)

    return wrapped


def interrupted_once(function, *, before=False):
    """The function with one Ctrl-C in it, at its end unless it is to be before it."""
    left = [KeyboardInterrupt("of the test")]

    def wrapped(*args, **kwargs):
        if before and left:
            raise left.pop()
        result = function(*args, **kwargs)
        if left:
            raise left.pop()
        return result

    return wrapped


def interrupt_when_an_answer_is_heard(state):
    DistributedCarrier.wait = interrupted_once(DistributedCarrier.wait)


def interrupt_receipt(state, where):
    """One Ctrl-C in the next receive()."""
    owner, name, before = {
        "while it waits": (Task, "done_by", True),
        "when it has it": (Inbox, "next", False),
        "while it applies": (WeightStrategy, "apply_weights", True),
        "before it answers": (Inbox, "answer", True),
    }[where]
    wrapped = interrupted_once(getattr(owner, name), before=before)
    setattr(owner, name, wrapped)


class OnlyHere:
    """Cannot be unpickled in another process."""

    def __reduce__(self):
        return unpickle_only_in, (os.getpid(),)


def unpickle_only_in(pid):
    if os.getpid() != pid:
        raise Trouble("not here")
    return OnlyHere()


class Extra(nn.Linear):
    def get_extra_state(self):
        return OnlyHere()

    def set_extra_state(self, state):
        pass


def send_what_only_the_trainer_can_unpickle(state):
    state.sender.send(Extra(500, 4))
