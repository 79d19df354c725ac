"""What a forked child can do with the handles of its parent: no harm."""

import gc
import signal

import pytest
import torch

import shmsync
from support.calls import Call, in_forked_child, outcome
from support.jobs.engine import read
from support.processes import segment_path
from support.weights import Net, stamp, stamped


def test_handles_of_the_parent_raise_in_a_forked_child():
    with shmsync.Publisher(Net(0)) as pub, shmsync.Subscriber(pub.handle, worker=1) as sub:
        module, others, x = sub.bind(Net(1)), [Net(2), Net(3)], torch.zeros(2, 6)
        calls = {
            "read": lambda: sub.read().__enter__(),
            "refresh": sub.refresh,
            "run": lambda: sub.run(print),
            "snapshot": sub.snapshot,
            "state_dict": sub.state_dict,
            "wait_version": lambda: sub.wait_version(1),
            "bind": lambda: sub.bind(others[0]),
            "forward": lambda: module(x),
            "publish": pub.publish,
            "update": lambda: pub.update().__enter__(),
            "adopt": lambda: pub.adopt(others[1]),
            "readers": pub.readers,
        }
        status, found = in_forked_child(lambda: {what: outcome(call) for what, call in calls.items()})
        assert status == 0
        assert found == dict.fromkeys(calls, "ForkedHandle")
        assert pub.publish() == 2
        assert sub.refresh() is True


@pytest.mark.no_cuda(reason="a forked child cannot attach to weights on its parent's GPU")
def test_forked_child_leaves_the_pin_of_its_parent_alone():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle, worker=1) as sub:
        section = sub.read()
        with section:

            def child():
                found = [outcome(section.__exit__, None, None, None)]
                found += [outcome(sub.refresh), outcome(sub.close), outcome(pub.close)]
                gc.collect()
                with shmsync.Subscriber(pub.handle, worker=2) as own:  # a new one works
                    found.append(read(own))
                return found

            status, found = in_forked_child(child)
            assert status == 0
            assert found[1:] == ["ForkedHandle", "returned", "returned", (1, 1, 1)]
            (info,) = pub.readers()
            assert (info.worker, info.pinned) == (1, 1)
            with pytest.raises(shmsync.ReaderStalled) as caught:
                Call(pub.publish, stamped(2), timeout=0.1).result()
            assert caught.value.missing == [1]
        assert segment_path(pub.name).exists()
        assert pub.publish(stamped(2)) == 2
        assert read(sub) == (2, 2, 2)


@pytest.mark.host_memory(reason="a device's memory cannot be mapped read-only")
@pytest.mark.parametrize("slots", [1, 2])
def test_weights_under_update_are_read_only_in_a_forked_child(slots):
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as sub:
        with pub.update() as weights:
            stamp(weights, 2)
            assert in_forked_child(lambda: weights["large"].fill_(666)) == (-signal.SIGSEGV, None)

            def finish():
                update = pub.update()
                return outcome(update.__enter__), outcome(pub.publish)

            assert in_forked_child(finish) == (0, ("ForkedHandle", "ForkedHandle"))
            stamp(weights, 3)
        assert read(sub) == (2, 3, 3)


def test_child_that_falls_out_of_the_update_of_its_parent_publishes_nothing():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle) as sub:
        update = pub.update()
        with update as weights:
            assert in_forked_child(lambda: outcome(update.__exit__, None, None, None)) == (0, "ForkedHandle")
            assert pub.version == 1
            assert outcome(read, sub, timeout=0) == "WriterBusy"
            stamp(weights, 2)
        assert read(sub) == (2, 2, 2)
