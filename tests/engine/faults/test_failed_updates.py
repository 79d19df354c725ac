"""An update that fails half way."""

from math import inf as for_ever

import pytest
import torch

import shmsync
from support.calls import Call
from support.jobs.engine import look, read, wait_version
from support.processes import until_waits
from support.weights import fail_half_way, stamp, stamped, stamps


def test_failed_update_in_place_poisons_until_a_full_publish(attached):
    with (
        shmsync.Publisher(stamped(1)) as pub,
        shmsync.Subscriber(pub.handle, timeout=0.1) as sub,
        shmsync.Subscriber(pub.handle, timeout=0.1, consistency="optimistic") as optimistic,
    ):
        waiter = attached(pub)
        fail_half_way(pub, "large")
        assert pub.version == 1
        for reader in (sub, optimistic):
            for call in (lambda: read(reader), lambda: reader.run(print), reader.snapshot):  # noqa: B023
                with pytest.raises(shmsync.Poisoned):
                    call()
        with pytest.raises(shmsync.PublishTimeout):
            waiter.call(wait_version, 2, timeout=0.2)
        waiter.start(wait_version, 2, timeout=for_ever)
        with pytest.raises(shmsync.Poisoned, match="all"):
            pub.publish({"scalar": torch.tensor(2)})
        with (
            pytest.raises(shmsync.Poisoned, match=r"publish\(\) first, with all weights, or without"),
            pub.update(),
        ):
            pass
        with pytest.raises(shmsync.Poisoned):
            read(sub)
        with shmsync.Subscriber(pub.handle, timeout=0.1) as joiner:
            with pytest.raises(shmsync.Poisoned):
                read(joiner)
            assert pub.publish(stamped(2)) == 2  # the number of the one that failed
            assert read(joiner) == (2, 2, 2)
        assert waiter.result() == 2
        assert read(sub) == read(optimistic) == waiter.call(look) == (2, 2, 2)
        with pub.update() as weights:
            stamp(weights, 3)
        assert read(sub) == (3, 3, 3)


CALLS = {
    "read": read,
    "run": lambda sub: sub.run(lambda: (sub.version, *stamps(sub.weights))),
    "snapshot": lambda sub: (lambda found: (found.version, *stamps(found.weights)))(sub.snapshot()),
    "refresh": lambda sub: (sub.refresh(), read(sub))[1],
    "versions": lambda sub: (next(sub.versions()), read(sub))[1],
}


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_every_call_waits_for_the_repair_until_its_deadline(consistency):
    with shmsync.Publisher(stamped(1)) as pub:
        fail_half_way(pub, "large")
        with (  # attaching does not wait
            shmsync.Subscriber(pub.handle, timeout=for_ever, consistency=consistency) as sub,
            shmsync.Subscriber(pub.handle, timeout=0.05, consistency=consistency) as hasty,
        ):
            with pytest.raises(shmsync.Poisoned):
                read(sub, timeout=0.05)
            for version, call in enumerate(CALLS.values(), 2):
                with pytest.raises(shmsync.Poisoned):
                    call(hasty)
                waiting = Call(call, sub)
                until_waits(waiting, "_try_again")
                pub.publish(stamped(version))
                assert waiting.result() == call(hasty) == (version,) * 3
                fail_half_way(pub, "large")
            pub.close()
            with pytest.raises(shmsync.Poisoned):  # nothing will repair it
                read(sub, timeout=for_ever)
