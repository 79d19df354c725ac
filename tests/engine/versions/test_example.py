"""The example of tests/README.md."""

import shmsync
from support.jobs.engine import attach
from support.weights import stamped


def version_in_a_section(state):  # runs in the worker; `state` lasts as long as the worker
    with state.sub.read() as section:
        return section.version


def test_a_worker_reads_the_newest_version(start):
    with shmsync.Publisher(stamped(1), slots=2) as pub:
        worker = start()
        worker.call(attach, pub.handle)
        pub.publish(stamped(2))
        assert worker.call(version_in_a_section) == 2
        worker.kill()
        pub.publish(stamped(3))
