"""A process that ends with everything open, from each place: it ends well, and leaves no segment."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, multiprocessing, sys, threading
import torch, shmsync
way, slots, consistency = sys.argv[1], int(sys.argv[2]), sys.argv[3]
net = torch.nn.Linear(2, 2)
publisher = shmsync.Publisher(net, slots=slots)
print(publisher.name, flush=True)
subscriber = shmsync.Subscriber(publisher.handle, consistency=consistency)
bound = subscriber.bind(torch.nn.Linear(2, 2))
with torch.no_grad():
    bound(torch.ones(2))
ours, theirs = multiprocessing.Pipe()
scheme = shmsync.SharedMemWeightSyncScheme()
scheme.init_on_sender("policy", model=net, pipes=[ours], num_workers=1)
section = subscriber.read()
section.__enter__()
def let_go():
    global publisher, subscriber, bound, section, scheme
    del bound, publisher, section, scheme, subscriber
if way == "atexit":
    atexit.register(let_go)
elif way == "a thread":
    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join()
elif way == "sys.exit":
    sys.exit(0)
"""
WAYS = [("the end", 1, "pinned"), ("atexit", 2, "optimistic"), ("a thread", 1, "live"), ("sys.exit", 2, "pinned")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "slots", "consistency"), WAYS)
def test_a_process_that_ends_with_everything_open(way, slots, consistency):
    command = [sys.executable, "-c", PROGRAM, way, str(slots), consistency]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=280)
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in ("Error", "Traceback", "Warning")), done.stderr
    assert f"shmsync.{done.stdout.strip()}" not in os.listdir("/dev/shm")
