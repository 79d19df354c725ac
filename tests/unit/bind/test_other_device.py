"""A worker's module on another device than the arena: it gets a private copy of each version, and never a torn one.

The decision is is_elsewhere(). The other device is a simulated one, so that the tests run anywhere.
"""

import gc
import threading

import pytest
import torch

from shmsync import Publisher, Subscriber
from shmsync.schemes import SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped, ask
from support.conformance.rigs import PipeRig
from support.devices.simulated import Simulated, installed
from support.jobs.engine import bind_copies

SLOTS = [("pinned", 1), ("pinned", 2), ("pinned", 3), ("optimistic", 1), ("optimistic", 2)]


SHM = PipeRig, SharedMemWeightSyncScheme
CASES = {  # the scheme, where its arena lies, where the modules lie
    "copies in the host's memory": (*SHM, {"device": "simulated:0"}, "cpu"),
    "copies on a device": (*SHM, {}, "simulated:0"),
    "views on a device": (*SHM, {"device": "simulated:0"}, "simulated:0"),
}


@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
@pytest.mark.parametrize("case", CASES)
def test_a_module_gets_each_version_where_it_lies(case, consistency, slots):
    rig, scheme, options, place = CASES[case]
    with installed(Simulated(5, 0.0005)):
        made = rig(scheme, consistency=consistency, slots=slots, **options)
        for net in made.nets:
            net.to(place)
        before = [[id(tensor) for tensor in net.parameters()] for net in made.nets]
        addresses = set()
        for value in (1, 2, 3):
            made.deliver(Stamped(value))
            assert made.stamps() == [value, value]
            addresses.add(made.nets[0].layer.weight.data_ptr())
        assert [[id(tensor) for tensor in net.parameters()] for net in made.nets] == before
        assert {net.layer.weight.is_cpu for net in made.nets} == {place == "cpu"}
        assert (len(addresses) > 1) == (slots > 1 and "views" in case)  # copies, and views of one slot, never move
        if "copies" in case:
            with torch.no_grad():
                made.nets[0].layer.weight.fill_(9)  # its own memory
            assert made.stamps()[1] == 3
            made.deliver(Stamped(4))
            assert made.stamps() == [4, 4]
        made.close()
        gc.collect()


@pytest.mark.parametrize(("consistency", "slots"), SLOTS)
def test_forward_sees_whole_versions_while_the_trainer_writes(consistency, slots):
    with Publisher(Stamped(1), slots=slots) as pub, Subscriber(pub.handle, consistency=consistency) as sub:
        net, over, seen = bind_copies(sub, Stamped(0)), threading.Event(), []

        def look():
            while not over.is_set():
                seen.append(ask(net))

        looking = Call(look)
        for value in range(2, 200):
            pub.publish(Stamped(value), timeout=60)
        over.set()
        looking.result()
        assert seen and all(isinstance(value, int) for value in seen)  # a pair would be two versions
        assert seen == sorted(seen)
        assert ask(net) == 199
