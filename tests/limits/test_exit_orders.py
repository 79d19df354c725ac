"""A process that ends with everything open: in several orders of letting go, from each place, it ends well."""

import itertools
import json
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, json, os, sys, threading
import torch, shmsync
from multiprocessing import Pipe
from shmsync.schemes import SharedMemWeightSyncScheme
torch.set_num_threads(1)


class Held:
    def __init__(self, slots, consistency):
        net = torch.nn.Linear(2, 2)
        self.publisher = shmsync.Publisher(net, slots=slots)
        self.subscriber = shmsync.Subscriber(self.publisher.handle, consistency=consistency, timeout=0.2)
        self.bound = self.subscriber.bind(torch.nn.Linear(2, 2))
        with torch.no_grad():
            self.bound(torch.ones(2))
        ours, theirs = Pipe()
        self.pipes = ours, theirs
        self.scheme = SharedMemWeightSyncScheme()
        self.scheme.init_on_sender("policy", model=net, pipes=[ours], num_workers=1)
        self.section = self.subscriber.read()
        self.section.__enter__()

    def let_go(self, order, close):
        for what in order:
            thing = getattr(self, what)
            if close and what == "section":
                try:
                    thing.__exit__(None, None, None)
                except (shmsync.ProtocolError, shmsync.ClosedError):  # another thread entered it, or it was closed
                    pass
            elif close and hasattr(thing, "close"):
                try:
                    thing.close()
                except (shmsync.ProtocolError, shmsync.WriterBusy):  # a section is open, here or in another thread
                    pass
            delattr(self, what)
            del thing


def live(case):
    order, way, close = case["order"], case["way"], case["close"]
    held = Held(case["slots"], case["consistency"])
    globals()["kept"] = held  # until the interpreter clears its modules
    if way == "return":
        held.let_go(order, close)
    elif way == "nothing let go":
        pass
    elif way == "atexit":
        atexit.register(held.let_go, order, close)
    elif way == "thread":
        thread = threading.Thread(target=held.let_go, args=(order, close))
        thread.start()
        thread.join()
    elif way == "daemon":
        begun = threading.Event()
        def use():  # a wait: in the middle of an operation of torch's, torch itself ends the process with SIGABRT
            sub = shmsync.Subscriber(held.publisher.handle)
            begun.set()
            sub.wait_version(9, timeout=float("inf"))
        threading.Thread(target=use, daemon=True).start()
        begun.wait()
    elif way == "exception":
        held.let_go(order[:2], close)
        sys.exit(0)
    elif way == "cycle":
        held.me = held
        globals().pop("kept")


gc.freeze()  # else each child walks, and so copies, what was imported
for case in json.loads(sys.argv[1]):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:  # the child ends as a program does
        live(case)
        break
    _, status = os.waitpid(pid, 0)
    if status != 0:
        print(f"{case} ended with {os.waitstatus_to_exitcode(status)}")
    if any(f".{pid}-" in entry for entry in os.listdir("/dev/shm")):
        print(f"{case} left its segment")
"""

THINGS = ("publisher", "subscriber", "bound", "section", "scheme")
CONSISTENCIES = ("pinned", "optimistic", "live")
LETTING_GO = itertools.product(("return", "atexit", "thread", "exception"), (True, False))
WAYS = [*LETTING_GO, ("nothing let go", True), ("daemon", True), ("cycle", True)]  # and: are things closed before?


def cases(orders):
    """Each order once, with the ways, slots and consistencies by turns."""
    found = []
    for number, order in enumerate(orders):
        way, close = WAYS[number % len(WAYS)]
        slots, consistency = 1 + number % 2, CONSISTENCIES[number % 3]
        found.append({"order": order, "way": way, "close": close, "slots": slots, "consistency": consistency})
    return found


ORDERS = list(itertools.permutations(THINGS))[:: len(WAYS)]  # one for each way


@pytest.mark.slow
def test_a_process_that_ends_with_everything_open():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases(ORDERS))],
        capture_output=True, text=True, check=False, cwd="/", timeout=280,
    )  # fmt: skip
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "Traceback" in line or "Warning" in line]
    assert errors == []
