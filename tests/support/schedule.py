"""Which tests of a parallel run stay together in one process, and which of these groups begin first.

Starting what tests need takes seconds: a fork server imports torch, a Ray cluster starts ten processes. So all tests
that need the same one run in the same worker of pytest-xdist, one after the other; programs and the zoo, which share
nothing, run one by one; all others stay together by file.
"""

from __future__ import annotations

import contextlib
import re

CREW = re.compile(r"[\[-](forkserver|fork|spawn|ray|rpc|distributed)[-\]]")
ONE_RAY = (
    "remote/ray/test_ray_schemes.py",
    "remote/ray/test_ray_modules.py",
    "remote/ray/test_ray_interrupts.py",
    "remote/ray/test_ray_tensor_transport.py",
    "remote/ray/test_updaters.py",
)
TWO_NODES_OF_RAY = ("remote/ray/test_ray_nodes.py", "remote/ray/test_ray_lost_nodes.py")

# The longest first, so that none of them begins when the others have ended: beginnings of what group_of() says.
LONGEST = (
    "conformance ray",
    "ray on two nodes",
    "conformance rpc",
    "ray",
    "conformance distributed",
    "conformance",
    "programs",
    "collectors",
    "integrations/collectors/test_faults.py",
    "remote",
    "integrations/collectors",
    "engine",
)


def group_of(nodeid):
    """The name of the group that a test runs in."""
    path, _, test = nodeid.partition("::")
    path = path.rpartition("tests/")[2]
    folder = path.partition("/")[0]
    if folder == "conformance" and (crew := CREW.search(test)):
        return f"conformance {crew[1]}"
    if path in ONE_RAY:
        return "ray"
    if path in TWO_NODES_OF_RAY:
        return "ray on two nodes"
    return f"{path}::{test}" if folder in ("programs", "zoo") else path


def rank(nodeid):
    """Of its group: smaller ones begin first."""
    group = group_of(nodeid)
    return next((number for number, begin in enumerate(LONGEST) if group.startswith(begin)), len(LONGEST))


def make_scheduler(config, log):
    """For pytest-xdist, which runs may lack."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        """Goes on when a process of the run dies.

        pytest-xdist alone gives that one's groups out whole, with the tests that are done. Then it waits for tests that
        no process runs.
        """

        def _split_scope(self, nodeid):
            return group_of(nodeid)

        def remove_node(self, node):
            """Give what it had to the others. Returns the test in which it died, which is not run again, or None."""
            work = self.assigned_work.pop(node)
            died_in = next((test for group in work.values() for test, done in group.items() if not done), None)
            if died_in is not None:
                work[group_of(died_in)][died_in] = True
                self.workqueue.update({name: group for name, group in work.items() if not all(group.values())})
                for each in self.nodes:
                    self._reschedule(each)
            return died_in

        def _reschedule(self, node):
            if node not in self.registered_collections or node.shutting_down:  # schedule() comes when it has collected
                return
            # A process keeps its last test until it is given another one, or told that there is none.
            while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()

        def _assign_work_unit(self, node):
            if node in self.registered_collections:
                with contextlib.suppress(OSError):  # it has just died, and remove_node() comes
                    super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # the order is that of rank()
    return Groups(config, log)
