"""What a trainer does in test_remote_recovery.py: things that only go wrong at the wrong moment."""

from __future__ import annotations

import math
import os
import select
import signal

from shmsync.schemes.remote._distributed import DistributedTransport
from shmsync.schemes.remote._parcel import Announcement, Stamp
from shmsync.schemes.remote._rpc import RPCTransport


def leave_a_version(state, value):
    """What a send leaves that was interrupted when its weights were published here, and nobody knew of them."""
    for parameter in state.model.parameters():
        parameter.data.fill_(value)
    sender = state.sender
    stamp = Stamp(sender._packer.session, "policy", sender.version + 1)
    sender._fan_out._local.publish_as(stamp, state.model.state_dict(), math.inf)


def kill_before_the_announcements(state, pid):
    """A relay that dies when it has answered, and no other worker has attached to its arena."""
    for transport in (DistributedTransport, RPCTransport):
        transport.post = _killing(transport.post, pid)


def _killing(post, pid):
    def wrapped(self, payload, *args, **kwargs):
        nonlocal pid
        if isinstance(payload, Announcement) and pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_until_dead(pid)
            pid = None
        return post(self, payload, *args, **kwargs)

    return wrapped


def wait_until_dead(pid):
    fd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll()
    os.close(fd)


def use_after_shutdown(state):
    """The name of the error."""
    state.scheme.shutdown()
    try:
        state.sender.send()
    except Exception as error:
        return type(error).__name__
    return None
