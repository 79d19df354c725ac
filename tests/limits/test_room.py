"""Little room: a small or full /dev/shm, little address space."""

import subprocess
import sys

import pytest

from support.jobs.engine import run_with_stderr

COMMON = """
import gc, os, resource, threading
import torch, shmsync

def state():
    gc.collect()
    mine = sorted(entry for entry in os.listdir("/dev/shm") if entry.startswith(f"shmsync.{os.getpid()}-"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mine

def life(words):
    with shmsync.Publisher({"t": torch.ones(words)}, slots=2) as pub, shmsync.Subscriber(pub.handle) as sub:
        pub.publish({"t": torch.full((words,), 2.0)})
        with sub.read() as section:
            assert section.weights["t"][-1] == 2 and section.version == 2
        sub.snapshot()

def refused(call, *errors):
    before = state()
    said = None
    try:
        call()
    except errors as error:
        said = str(error)
    assert said is not None, "it was not refused"
    assert state() == before, (before, state(), said)  # now that nothing holds the error's frames
    return said

def fill():
    fd = os.open("/dev/shm/full", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)

life(4)
"""

# In a /dev/shm of 4 MB with room for two entries.
SMALL = """
life(20_000_000)  # 2 x 80 MB: the weights lie in a memfd, not there
assert state()[2] == []

fill()
said = refused(lambda: life(4), shmsync.NoSpace)
assert "/dev/shm" in said and "larger" in said, said
os.unlink("/dev/shm/full")
life(4)

with shmsync.Publisher({"t": torch.ones(4)}) as pub:  # filled while an arena is open
    sub = shmsync.Subscriber(pub.name)
    fill()
    for value in range(2, 50):
        assert pub.publish({"t": torch.full((4,), float(value))}) == value
        assert sub.snapshot().weights["t"][0] == value
    shmsync.Subscriber(pub.name).close()
    sub.close()
pub = sub = None  # which have their entry as long as they live
os.unlink("/dev/shm/full")

with shmsync.Publisher({"t": torch.ones(4)}), shmsync.Publisher({"t": torch.ones(4)}):  # no room for an entry
    refused(lambda: life(4), shmsync.NoSpace)
life(4)
"""


@pytest.mark.slow
def test_a_small_dev_shm():
    mount = 'mount -t tmpfs -o nr_inodes=3,size=4m none /dev/shm || exit 77; exec "$@"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", COMMON + SMALL],
        capture_output=True, text=True, check=False, cwd="/", timeout=240,
    )  # fmt: skip
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"this system does not allow it: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr


LITTLE_ADDRESS_SPACE = """
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
weights = {"t": torch.ones(10_000_000)}  # 40 MB
refused(lambda: shmsync.Publisher(weights, slots=12), shmsync.NoSpace)
life(1000)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with shmsync.Publisher(weights, slots=4) as pub:
    size = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    refused(lambda: shmsync.Subscriber(pub.handle), shmsync.NoSpace)
    assert pub.readers() == []
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shmsync.Subscriber(pub.handle).close()
"""


def test_little_address_space(start, tmp_path):
    start().call(run_with_stderr, COMMON + LITTLE_ADDRESS_SPACE, None, tmp_path / "stderr")
