"""What SharedMemWeightSyncScheme does beyond the others: arenas, registration, groups."""

import gc
import os
import re
from multiprocessing import connection

import pytest
import torch
from tensordict import TensorDict

import shmsync
from shmsync.errors import ManifestMismatch, ReaderStalled
from shmsync.schemes import SharedMemTransport, SharedMemWeightSyncScheme
from support.conformance.nets import Stamped, Tied, numbers, shared
from support.conformance.rigs import PipeRig
from support.conformance.table import SHM
from support.processes import mapping_at


class Slow(Stamped):
    """Takes its time between two looks at its weights."""

    def forward(self, go=None):
        before = super().forward()
        if go is not None:
            go()
        return before[0], super().forward()[1]


def mapping_of_weights(state):
    """(permissions, inode, path) of the pages where the model's weights are."""
    return mapping_at(state.models["policy"].layer.weight.data_ptr())


def slow_forward(state):
    """Tell the trainer that a forward runs, and stay in it until the next weights have been announced."""

    def go():
        state.pipe.send("inside")
        connection.wait([state.pipe])

    with torch.no_grad():
        return state.models["policy"](go)


@pytest.fixture(params=[SHM], ids=lambda entry: entry.name)
def entry(request):
    return request.param


def arenas():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"shmsync.{os.getpid()}-")]


class WithState(Stamped):
    """Keeps more than tensors."""

    def get_extra_state(self):
        return {"steps": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("source", [WithState, lambda value: WithState(value).state_dict()], ids=["module", "dict"])
def test_extra_state_is_refused_by_name(fleet, source):
    sender = fleet.open()
    with pytest.raises(ManifestMismatch, match=r"extra state .*the model itself.*nothing was sent"):
        sender.send(source(1))
    assert arenas() == []
    sender.send(Stamped(2))
    assert fleet.stamps() == [2] * 3
    with pytest.raises(ManifestMismatch, match="extra.state"):  # nor is it lost where an arena is there already
        sender.send(source(3))


# ---- registration


def test_unknown_id_without_auto_register_is_a_key_error_that_names_the_known(fleet):
    scheme = fleet.make(auto_register=False)
    scheme.register_shared_weights("env.value_net", shared(Stamped(0)))
    sender = fleet.open("policy", scheme=scheme)
    with pytest.raises(KeyError, match=r"'policy' is not registered, only \['env.value_net'\] are"):
        sender.send(Stamped(1))
    assert fleet.stamps() == [0, 0, 0]


def test_registered_weights_reach_the_workers_before_the_first_send(fleet):
    scheme = fleet.make(auto_register=False)
    sender = fleet.open("policy", scheme=scheme)
    scheme.register_shared_weights("policy", shared(Stamped(3)))
    assert fleet.stamps() == [3, 3, 3]
    sender.send(Stamped(2))
    assert fleet.stamps() == [2, 2, 2]


def test_registering_what_is_registered_is_a_runtime_error(fleet):
    transport, sending = SharedMemTransport(), fleet.make()
    transport.register_weights("policy", shared(Stamped(1)))
    with SharedMemWeightSyncScheme({"policy": shared(Stamped(1))}) as given:
        fleet.open("policy", scheme=sending).send(Stamped(1))
        for register in (transport.register_weights, given.register_shared_weights, sending.register_shared_weights):
            with pytest.raises(RuntimeError, match="'policy' is registered already"):
                register("policy", shared(Stamped(2)))
    transport.close()


def test_weights_that_cannot_be_registered_leave_room_for_others(fleet):
    sender = fleet.open()
    refused = TensorDict({"layer": {"weight": torch.zeros(2, device="meta")}})
    with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
        sender._scheme.register_shared_weights("policy", refused)
    sender._scheme.register_shared_weights("policy", shared(Stamped(4)))
    assert fleet.stamps() == [4, 4, 4]


def test_a_publisher_of_the_users_own_takes_what_a_scheme_takes(rig_of):
    with shmsync.Publisher(Tied(1)) as pub:
        rig = rig_of(PipeRig, SharedMemWeightSyncScheme, nets=[Tied(0)], publisher=pub)
        state = Tied(2).state_dict()
        assert "cache" not in state  # a buffer that is never saved
        rig.deliver(state)
        assert rig.nets[0].layer.weight.unique().tolist() == [2]


def test_a_receiver_that_is_made_anew_goes_on_with_the_same_module(rig_of):
    rig = rig_of(PipeRig, SharedMemWeightSyncScheme, nets=[Stamped(0)])
    rig.deliver(Stamped(1))
    for value, worker in enumerate([rig.workers[0], rig.make_scheme(), rig.make_scheme()], 2):
        worker.init_on_worker("policy", pipe=rig.pipes[1], model=rig.nets[0])
        rig.receivers = [worker.get_receiver()]
        assert rig.deliver(Stamped(value)) == value and rig.stamps() == [value]


# ---- plain shared TensorDicts


def test_plain_shared_tensordict_is_written_without_any_worker():
    plain = shared(Stamped(0))
    transport = SharedMemTransport({"policy": plain})
    transport.send_weights("policy", Stamped(3))
    assert numbers(plain) == {3.0}
    transport.close()


def test_first_weights_that_fit_no_worker_leave_room_for_others(fleet):
    sender = fleet.open()
    with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
        sender.send(Stamped(1, width=9))
    assert arenas() == [] and sender._scheme.policy_weights == {} and fleet.stamps() == [0] * 3
    sender.send(Stamped(2))
    assert fleet.stamps() == [2] * 3
    assert len(arenas()) == 1


# ---- groups


def test_part_of_a_group_is_a_value_error_that_says_how_to_split(fleet):
    sender = fleet.open()
    sender.send(Stamped(1))
    for part, split in ((0, [[0], [1, 2]]), ([0, 2], [[0, 2], [1]])):
        with pytest.raises(ValueError, match=re.escape(f"groups={split}")):
            sender.send(Stamped(2), part)
    assert fleet.stamps() == [1, 1, 1]
    assert sender.send(Stamped(3), [0, 1, 2]) == 2


def test_groups_share_an_arena_and_are_sent_to_as_a_whole(fleet):
    sender = fleet.open(groups=[[0, 1], [2]])
    sender.send(Stamped(1))
    assert len(arenas()) == 2
    sender.send(Stamped(2), [0, 1])
    sender.send(Stamped(3), 2)
    assert fleet.stamps() == [2, 2, 3]
    with pytest.raises(ValueError, match=r"groups=\[\[0\], \[1\]\]"):
        sender.send(Stamped(4), [0, 2])
    assert fleet.stamps() == [2, 2, 3]


# ---- memory


def test_workers_read_one_copy_of_the_weights(fleet):
    sender = fleet.open()
    assert arenas() == []
    for value in (1, 2):
        sender.send(Stamped(value))
        assert len(arenas()) == 1
    permissions, inodes, _ = zip(*(worker.call(mapping_of_weights) for worker in fleet.workers), strict=True)
    assert not any("w" in each for each in permissions)
    assert len(set(inodes)) == 1


def test_weights_do_not_change_during_a_forward(fleet):
    sender = fleet.open("policy", Slow)
    sender.send(Slow(1))
    fleet.hold(0)
    fleet.workers[0].start(slow_forward)
    assert fleet.pipes[0].recv() == "inside"
    with pytest.raises(ReaderStalled, match="worker 0"):
        sender.send(Slow(2), timeout=0.2)  # its one slot is being read
    fleet.pipes[0].send("go on")
    assert fleet.workers[0].result() == (1, 1)
    fleet.release(0)
    sender.send(Slow(3))
    assert fleet.stamps() == [3, 3, 3]


# ---- the end


def test_scheme_that_is_collected_leaves_no_arena(fleet):
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=fleet.pipes)
    for index in range(3):
        fleet.join(index, scheme)
    scheme.get_sender().send(Stamped(1))
    assert len(arenas()) == 1
    del scheme
    gc.collect()
    assert arenas() == []
    assert fleet.stamps() == [1, 1, 1]  # the workers keep what they have
