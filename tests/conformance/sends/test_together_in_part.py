"""send_together() of which only a part comes to a worker in time: it keeps what it had of every model."""

import itertools
import multiprocessing
import os
import signal
import time

import pytest
import torch

from shmsync.engine.source.pickling import dumps
from shmsync.errors import AckTimeout
from shmsync.schemes import MultiProcessWeightSyncScheme, send_together
from shmsync.schemes.link import messages
from shmsync.schemes.link.connection import Channel
from shmsync.schemes.link.messages import Tag, Tagged
from support.calls import naming
from support.choice import first
from support.conformance import peers
from support.conformance.nets import Stamped, ask, stamp
from support.conformance.table import MP, PIPES, SHM, in_processes, only
from support.faults.interrupts import on_alarm
from support.processes import until


@pytest.fixture(params=PIPES, ids=lambda entry: entry.name)
def entry(request):
    """Models are sent together over pipes alone."""
    return request.param


def meet_with_one_stopped(fleet, policy, value, match=None):
    """Send both, and again while worker 1 is stopped in the meeting, which it gives up; what was sent."""
    nets = Stamped(0, 4), Stamped(0, 100_000)  # the second does not fit into the pipe
    send_together({policy: stamp(nets[0], 1), value: stamp(nets[1], 1)}, timeout=60)
    fleet.workers[1].call(peers.stop_when_prepared)
    with naming(AckTimeout, [1], match=match):
        send_together({policy: stamp(nets[0], 2), value: stamp(nets[1], 2)}, timeout=1.0)
    os.kill(fleet.workers[1].pid, signal.SIGCONT)
    time.sleep(0.8)  # the worker's patience is half a second
    return nets


@only(MP)
@in_processes
def test_a_worker_that_gets_one_model_and_then_nothing_for_a_while_keeps_both(fleet):
    """The first model fits into the pipe, the second does not; the trainer writes on only at its next call."""
    policy = fleet.open("policy", Stamped, 0, 4)
    value = fleet.open("env.value_net", Stamped, 0, 100_000)
    nets = meet_with_one_stopped(fleet, policy, value)
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([2, 1, 2], [2, 1, 2])
    channel = Channel.of(fleet.pipes[1])
    until(lambda: value.pending(1) or not channel.unsent)  # each call writes on, until the worker has the rest
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([2, 1, 2], [2, 1, 2])
    policy.resend(timeout=60)
    value.resend(timeout=60)
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([2, 2, 2], [2, 2, 2])
    send_together({policy: stamp(nets[0], 3), value: stamp(nets[1], 3)}, timeout=60)
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([3, 3, 3], [3, 3, 3])


@only(MP)
@in_processes
def test_shared_memory_is_written_when_what_goes_through_the_pipe_has_arrived(fleet):
    """What lies in an arena is in use at once, so a worker that lacks the other model would use the two apart."""
    policy, value = fleet.open("policy", scheme=SHM.make()), fleet.open("env.value_net", Stamped, 0, 100_000)
    late = r"worker 1 \(pid \d+\) did not take all of 'env.value_net' from the pipe in time; stopped: worker 1"
    nets = meet_with_one_stopped(fleet, policy, value, late)
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([1] * 3, [1] * 3)
    send_together({policy: stamp(nets[0], 3), value: stamp(nets[1], 3)}, timeout=60)
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([3] * 3, [3] * 3)


# ---- the worker's side alone: every order in which a part of a meeting may come

VERSION, ALONE = 5, 6


def parts(deadline):
    """The messages that a trainer may write before, in and after a meeting."""
    meeting = (("a", "b"), (1, VERSION, deadline))
    return {
        "prepare": (meeting, messages.PREPARE),
        "a": weights("a", VERSION),
        "b": weights("b", VERSION),
        "resume": (meeting, messages.RESUME),
        "a alone": weights("a", ALONE),
    }


def weights(model_id, version):
    return Tagged(((model_id, Stamped(version).state_dict()), messages.UPDATE), Tag(model_id, version))


@pytest.fixture
def worker():
    """The trainer's end of a pipe, and two receivers at the other, in this process."""
    ours, theirs = multiprocessing.Pipe()
    schemes = {model_id: MultiProcessWeightSyncScheme() for model_id in ("a", "b")}
    models = {model_id: Stamped(1) for model_id in schemes}
    for model_id, scheme in schemes.items():
        scheme.init_on_worker(model_id, model=models[model_id], worker_idx=0, pipe=theirs)
    yield ours, [scheme.get_receiver() for scheme in schemes.values()], models
    for scheme in schemes.values():
        scheme.shutdown()
    ours.close()
    theirs.close()


def orders():
    """What the trainer writes, in order: anything may be missing; "|": then the worker receives until it gives up."""
    for rest in itertools.product(("a", "b", "|", ""), repeat=3):
        for last in ("resume", "a alone", ""):
            yield tuple(each for each in ("prepare", *rest, "|", last) if each)


ORDERS = sorted(set(orders()))


@pytest.mark.parametrize("order", first(ORDERS, 12), ids="-".join)
def test_no_order_of_the_messages_makes_a_worker_use_one_of_two_models(worker, order):
    pipe, receivers, models = worker
    messages_of = parts(time.monotonic() - 1)  # the time is over: a worker waits only for what is there
    sent = []
    for each in order:
        if each == "|":
            drain(receivers)
            check(models, sent)
        else:
            pipe.send_bytes(dumps(messages_of[each]))
            sent.append(each)
    drain(receivers)
    check(models, sent)
    for model_id, receiver in zip("ab", receivers, strict=True):  # whatever came before, the next send counts
        pipe.send_bytes(dumps(weights(model_id, 9)))
        until(lambda receiver=receiver: receiver.receive(timeout=0.01))
        assert ask(models[model_id]) == 9


def drain(receivers):
    for _ in range(3):
        for receiver in receivers:
            receiver.receive(timeout=0)


def check(models, sent):
    a, b = ask(models["a"]), ask(models["b"])
    assert b in (1, VERSION)
    if "a alone" in sent:
        assert a == ALONE
    else:
        assert a == b, f"one is new and the other old after {sent}"


@pytest.mark.parametrize("first_one", ["a", "b"])
def test_a_refused_part_says_so_to_its_sender(worker, first_one):
    pipe, receivers, models = worker
    messages_of = parts(time.monotonic() - 1)
    pipe.send_bytes(dumps(messages_of["prepare"]))
    pipe.send_bytes(dumps(messages_of[first_one]))
    drain(receivers)
    assert pipe.recv()[1] == messages.PREPARED
    failure, word = pipe.recv()
    assert word == messages.FAILED
    error = failure.exception()
    assert isinstance(error, AckTimeout) and error.version == VERSION
    assert "'a', 'b' was sent together" in str(error) and "Send them together again" in str(error)
    assert torch.equal(models[first_one].layer.weight, Stamped(1).layer.weight)


@pytest.mark.parametrize("breaks", ["interrupt", "garbage"])
def test_a_meeting_that_an_error_ends_leaves_no_half_of_it(worker, breaks):
    pipe, receivers, models = worker
    messages_of = parts(time.monotonic() + 60)
    pipe.send_bytes(dumps(messages_of["prepare"]))
    pipe.send_bytes(dumps(messages_of["a"]))
    if breaks == "garbage":
        pipe.send_bytes(dumps(((("a",), "nonsense"), messages.PREPARE)))
        with pytest.raises(Exception, match="no message of shmsync"):
            receivers[0].receive(timeout=1)
    else:
        with on_alarm(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            receivers[0].receive(timeout=1)
    pipe.send_bytes(dumps(messages_of["b"]))
    drain(receivers)
    assert (ask(models["a"]), ask(models["b"])) == (1, 1)
    pipe.send_bytes(dumps(messages_of["resume"]))
    for model_id in "ab":  # resend() brings the same version
        pipe.send_bytes(dumps(messages_of[model_id]))
    drain(receivers)
    assert (ask(models["a"]), ask(models["b"])) == (VERSION, VERSION)
