"""A process exits while daemon threads of it are in our waits: exit code 0, and nothing on stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import math, multiprocessing, threading
import torch
import shmsync
from support.processes import until_waits

def daemon(where, call, *args, **kwargs):
    thread = threading.Thread(target=call, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    until_waits(thread, where)

def both(slots):
    pub = shmsync.Publisher({"t": torch.zeros(4)}, slots=slots)
    sub = shmsync.Subscriber(pub.handle, worker=0)
    opened.append((pub, sub))
    return pub, sub

opened, for_ever = [], math.inf
pub, _ = both(2)
daemon("_wait_for_acks", pub.publish, wait="all", timeout=for_ever)
pub, sub = both(1)
section = sub.read()
section.__enter__()
daemon("begin", pub.publish, timeout=for_ever)
pub, sub = both(1)
update = pub.update()
update.__enter__()
daemon("_try_again", lambda: sub.read(timeout=for_ever).__enter__())
_, sub = both(2)
daemon("_wait_for", sub.wait_version, 9, timeout=for_ever)
ours, theirs = multiprocessing.Pipe()
scheme = shmsync.SharedMemWeightSyncScheme()
scheme.init_on_worker("policy", pipe=theirs, model=torch.nn.Linear(2, 2))
daemon("receive", scheme.get_receiver().receive, timeout=10**6)
"""


@pytest.mark.slow
def test_daemon_threads_in_waits_do_not_disturb_the_exit():
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
