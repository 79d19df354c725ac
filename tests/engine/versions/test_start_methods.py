"""Workers attach whichever way their process was started."""

import json
import multiprocessing
import subprocess
import sys

import pytest

import shmsync
from support.jobs.engine import attach, detach, look
from support.weights import stamped
from support.worker import Worker

FORKED = pytest.param("fork", marks=pytest.mark.no_cuda(reason="a forked child cannot use its parent's GPU"))


@pytest.mark.parametrize("method", ["forkserver", FORKED])
def test_worker_attaches_by_handle(server, method):
    with shmsync.Publisher(stamped(1)) as pub:
        worker = Worker(server if method == "forkserver" else multiprocessing.get_context(method))
        try:
            assert worker.call(attach, pub.handle, worker=3) == 1
            pub.publish(stamped(2))
            assert worker.call(look) == (2, 2, 2)
            assert [reader.worker for reader in pub.readers()] == [3]
            worker.call(detach)
            assert pub.readers() == []
            # Its end takes nothing away from us, not even after a fork, which copied our handles.
            assert worker.finish() == 0
        finally:
            worker.end()
        assert pub.publish(stamped(3)) == 3
        with shmsync.Subscriber(pub.name) as sub:
            assert sub.version == 3


UNRELATED = """
import json, sys, torch
torch.set_num_threads(1)
import shmsync
with shmsync.Subscriber(sys.argv[1], worker=7) as sub:
    before = sub.version
    print(json.dumps({"attached": before}), flush=True)
    sub.wait_version(2, timeout=float("inf"))
    with sub.read() as section:
        seen = {"version": section.version, "word": int(section.weights["large"].max())}
    print(json.dumps(seen), flush=True)
"""


def test_unrelated_process_attaches_by_name(name):
    with shmsync.Publisher(stamped(1), name=name) as pub:
        command = [sys.executable, "-c", UNRELATED, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True) as process:
            try:
                assert json.loads(process.stdout.readline()) == {"attached": 1}
                assert [(reader.worker, reader.pid) for reader in pub.readers()] == [(7, process.pid)]
                pub.publish(stamped(2))
                assert json.loads(process.stdout.readline()) == {"version": 2, "word": 2}
                assert process.wait() == 0
            finally:
                process.kill()
        assert pub.readers() == []
