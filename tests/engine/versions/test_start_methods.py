"""Workers attach whichever way their process was started."""

import multiprocessing

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
