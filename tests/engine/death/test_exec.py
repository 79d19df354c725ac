"""A process that runs another program keeps pid and start time, and yet is another: its rows and names are freed."""

import multiprocessing
import os
import subprocess
import time
from math import inf as for_ever
from multiprocessing import resource_sharer

import pytest

import shmsync
from shmsync import _native
from shmsync.memory import inspection as observed
from shmsync.memory.system.process import Peer, Peers, ProcessState, me, owner_word
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from shmsync.schemes.link.connection import Channel
from support.calls import Call
from support.faults.scenarios.schemes import serve_scheme
from support.jobs.engine import GONE, attach, begin_update, enter, look, open_arena, read
from support.processes import descriptors, until
from support.programs.programs import Program, become_sleep, run_a_child, until_it_sleeps
from support.weights import Net, stamped


def leave_by_exec(worker):
    worker.start(become_sleep)
    until_it_sleeps(worker.pid)


def test_worker_that_execs_inside_a_section_holds_nobody_up(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        worker = attached(pub, worker=5)
        worker.call(enter)
        leave_by_exec(worker)
        assert [reader.state for reader in pub.readers()] == [ProcessState.DEAD]
        for v in range(2, 6):
            assert pub.publish(stamped(v)) == v
        assert pub.readers() == []
        assert worker.process.is_alive()


def test_nobody_waits_for_the_exit_code_of_a_worker_that_execs(start):
    """Asking for its exit code waited for a second, beyond the deadline of the send that names it."""
    took = []
    for worker in start(3):
        peer = Peer(process=worker.process)
        peer.introduce(owner_word(worker.pid))
        leave_by_exec(worker)
        until(lambda peer=peer: peer.dead)
        began = time.monotonic()
        assert not peer.finished
        took.append(time.monotonic() - began)
        peer.close()
    assert min(took) < 0.1


def test_worker_that_execs_is_named_by_who_waits_for_its_ack(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        worker = attached(pub, worker=5)
        call = Call(pub.publish, stamped(2), wait=[5])
        until(lambda: pub.version == 2)
        leave_by_exec(worker)
        with pytest.raises(shmsync.WorkerDied, match="worker 5") as caught:
            call.result()
        assert caught.value.missing == [5]


def test_joiner_takes_over_the_row_of_a_worker_that_execs(start):
    worker, joiner = start(2)
    with shmsync.Publisher(stamped(1), max_readers=1) as pub:
        worker.call(attach, pub.handle, worker=5)
        leave_by_exec(worker)
        assert joiner.call(attach, pub.handle, worker=6) == 1
        assert [reader.worker for reader in pub.readers()] == [6]


@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_worker_of_a_scheme_that_execs_is_named_by_the_next_send(start, scheme):
    """The end of its pipe stays open, as it does where a sibling or the new program has inherited it."""
    worker, net = start(), Net(0)
    ours, theirs = multiprocessing.Pipe()
    worker.begin(serve_scheme, scheme(), theirs)
    made = scheme()
    try:
        made.init_on_sender("policy", pipes=[ours], procs=[worker.process], model=net)
        sender = made.get_sender()
        assert sender.send(timeout=for_ever) == 1
        until(lambda: answered_in_full(sender, ours))
        worker.conn.send((become_sleep, (), {}))
        until_it_sleeps(worker.pid)
        with pytest.raises(shmsync.WorkerDied, match="another program") as caught:
            sender.send(timeout=for_ever)
        assert caught.value.missing == [0]
    finally:
        made.shutdown()
        resource_sharer.stop()  # its thread has passed the pipe to the worker
        for end in (ours, theirs):
            end.close()


def answered_in_full(sender, pipe):
    """Has the worker said who it is? It does so in the answers that take the slow way."""
    if Channel.of(pipe).role.peer._owner:
        return True
    sender.send({f"{key}": value for key, value in Net(0).state_dict().items()}, timeout=for_ever)
    return False


def test_trainer_that_execs_is_dead_to_its_readers(start, name):
    trainer, waiter = start(2)
    handle = trainer.call(open_arena, 2, name=name)
    with shmsync.Subscriber(handle) as sub:
        waiter.call(attach, handle)
        call = Call(sub.wait_version, 3, timeout=for_ever)
        leave_by_exec(trainer)
        with pytest.raises(shmsync.WriterDied, match=str(trainer.pid)):
            call.result()
        assert read(sub) == waiter.call(look) == (2, 2, 2)
        with pytest.raises(GONE):
            shmsync.Subscriber(name)
        with shmsync.Publisher(stamped(7), name=name), shmsync.Subscriber(name) as fresh:
            assert read(fresh) == (1, 7, 7)


@pytest.mark.parametrize("slots", [1, 2])
def test_trainer_that_execs_inside_update(open_trainer, slots):
    trainer = open_trainer(2, slots=slots)
    with shmsync.Subscriber(trainer.handle) as sub:
        trainer.call(begin_update, 3)
        leave_by_exec(trainer)
        if slots == 1:
            with pytest.raises(shmsync.Poisoned) as caught:
                read(sub, timeout=for_ever)
            assert caught.value.version == 3
        else:
            assert read(sub) == (2, 2, 2)


# A trainer that starts itself again, as those do that change their environment or take up new code.
AGAIN = """
import os, sys
import torch, shmsync
name, life = sys.argv[1], int(sys.argv[2])
pub = shmsync.Publisher({"t": torch.full((4,), life)}, name=name)
print("life", life, flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[sys.orig_argv.index("-c") + 1], name, str(life + 1)])
"""


@pytest.mark.full  # the tests above exec a trainer
def test_trainer_that_execs_itself_gets_its_name_again(name):
    """With fixed addresses its new image looks like the old one, but it does not have the old one's slab."""
    with Program(AGAIN, name, 1, before=("setarch", "-R")) as trainer:
        for life in (1, 2):
            assert trainer.hear() == f"life {life}"
            with shmsync.Subscriber(name) as sub, sub.read() as section:
                assert section.weights["t"].tolist() == [life] * 4
            trainer.say()


# A worker that starts itself again in the middle of a section.
WORKER = """
import os, sys
import shmsync
handle = shmsync.Handle(sys.argv[1], bytes.fromhex(sys.argv[2]))
sub = shmsync.Subscriber(handle, worker=5)
sub.read().__enter__()
print("version", sub.version, flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[sys.orig_argv.index("-c") + 1], *sys.argv[1:]])
"""


def test_worker_that_execs_itself_frees_its_row():
    with (
        shmsync.Publisher(stamped(1), slots=2, max_readers=1) as pub,
        Program(WORKER, pub.name, pub.handle.session.hex()) as worker,
    ):
        for version in (1, 2):
            assert worker.hear() == f"version {version}"
            assert [(reader.worker, reader.pinned) for reader in pub.readers()] == [(5, version)]
            assert pub.publish(stamped(version + 1)) == version + 1
            worker.say()


@pytest.mark.full
def test_with_fixed_addresses_the_same_program_counts_as_the_one_before_it():
    """Nothing tells them apart, so the row of before stays until the process ends: late, but never torn."""
    with shmsync.Publisher(stamped(1), max_readers=2) as pub:
        with Program(WORKER, pub.name, pub.handle.session.hex(), before=("setarch", "-R")) as worker:
            assert worker.hear() == "version 1"
            worker.say()
            assert worker.hear() == "version 1"
            assert [(reader.state, reader.pinned) for reader in pub.readers()] == [(ProcessState.LIVE, 1)] * 2
            with pytest.raises(shmsync.ReaderStalled):
                pub.publish(stamped(2), timeout=0.1)
        assert pub.publish(stamped(2), timeout=for_ever) == 2
        assert pub.readers() == []


def test_no_descriptor_of_an_arena_outlives_exec():
    before = descriptors()
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle):
        made = {fd for fd, target in descriptors().items() if before.get(fd) != target}
        assert made
        assert not [fd for fd in made if os.get_inheritable(fd)]


def test_starting_a_child_program_changes_nothing(attached):
    with shmsync.Publisher(stamped(1)) as pub:
        before = me().owner
        worker = attached(pub, worker=5)
        owners = pub._writer.arena.control.owners()
        worker.call(run_a_child)
        subprocess.run(["/bin/true"], check=True)
        assert me().owner == before
        assert [reader.state for reader in pub.readers()] == [ProcessState.LIVE]
        assert pub._writer.arena.control.owners() == owners
        assert not Peer(owner=before).dead


def test_an_image_that_cannot_be_read_may_be_any():
    owner = me().owner
    unknown = owner >> 20 << 20
    other = owner ^ 1 if (owner ^ 1) != unknown else owner ^ 2
    assert not Peer(owner=unknown).dead
    assert Peer(owner=other).dead
    assert _native.may_be_same_owner(owner, unknown) and _native.may_be_same_owner(unknown, other)
    assert not _native.may_be_same_owner(owner, other)
    assert _native.image_from([5, 6, 7]) not in (0, _native.image_from([5, 6, 8]))
    assert _native.image_from([1, 6, 7]) == 0


def test_list_does_not_show_a_trainer_that_execs_as_alive(open_trainer, name):
    trainer = open_trainer(1)
    peers = Peers()
    assert observed.look(name, peers).owner is observed.Condition.ALIVE
    leave_by_exec(trainer)
    seen = observed.look(name, peers)
    assert seen is None or seen.owner is observed.Condition.DEAD  # None: another publisher has removed it already
    peers.close()
