"""sub.verify(): what a bound module holds is compared with the checksums of the version, and every fault is named."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import logging
import pickle
import sys

import pytest
import torch
from shmsync.engine.verify.request import VerifyRequest
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shmsync
from support.calls import Call
from support.faults.interrupts import Interrupt, interrupt_at
from support.processes import until, until_waits
from support.weights import fail_half_way, step

NO_HANDLER = ("with ", "try:")  # between the end of such a line and the next one no signal handler runs


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)
        self.emb = nn.Embedding(8, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.emb.weight  # tied

    def forward(self, x):
        return self.head(self.out(self.body(x)))


def leaves(module):
    return len(module.state_dict())


@pytest.fixture
def delivered(publisher, subscriber):
    """delivered(...) -> a trainer's module, a worker's that is bound to it, and both ends, with checksums."""

    def make(slots=1, consistency="pinned", factory=Agent, **options):
        trainer, worker = factory(), factory().eval()
        pub = publisher(trainer, slots=slots, checksum=True, **options)
        sub = subscriber(pub, consistency=consistency)
        sub.bind(worker)
        return trainer, worker, pub, sub

    return make


def changed(trainer, pub):
    with torch.no_grad():
        for tensor in trainer.state_dict().values():
            tensor.add_(1)
    return pub.publish()


SOURCES = {
    "module": lambda module: module,
    "state_dict": lambda module: module.state_dict(),
    "tensordict": TensorDict.from_module,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("consistency", ["pinned", "optimistic", "live"])
def test_what_was_delivered_is_proved(both, source, slots, consistency):
    trainer, worker = Agent(), Agent().eval()
    pub, sub = both(SOURCES[source](trainer), slots=slots, checksum=True, consistency=consistency)
    sub.bind(worker)
    for _ in range(4):
        proof = sub.verify()
        assert proof == (pub.version, leaves(trainer), (), ())
        changed(trainer, pub)
    with sub.read():
        if consistency == "pinned":
            assert sub.verify().version == pub.version
        else:
            with pytest.raises(shmsync.ProtocolError, match="not pinned"):
                sub.verify()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_only_what_a_partial_publish_gives_is_read_again(delivered, slots):
    _, _, pub, sub = delivered(slots)
    for number in range(5):
        pub.publish({"head.bias": torch.full((2,), float(number))})
        assert sub.verify().version == pub.version
    with pytest.raises(shmsync.ManifestMismatch):
        pub.publish({"head.bias": torch.zeros(3)})
    assert sub.verify().version == pub.version


@pytest.mark.parametrize("slots", [1, 2])
def test_updates_and_failed_updates(delivered, slots):
    _, _, pub, sub = delivered(slots)
    with pub.update() as weights:
        weights["head", "bias"].fill_(7)
    assert sub.verify().version == pub.version
    pub.publish({"head.bias": torch.ones(2)})
    fail_half_way(pub, ("head", "weight"))
    pub.publish()
    with pub.update() as weights:
        weights["emb", "weight"].fill_(7)
    assert sub.verify().version == pub.version


def test_adopted_weights(publisher, subscriber):
    trainer, worker = Agent(), Agent().eval()
    pub = publisher(trainer, checksum=True)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    pub.adopt(trainer, optimizer)
    sub = subscriber(pub)
    sub.bind(worker)
    for _ in range(3):
        trainer(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert sub.verify().version == pub.version
    if pub._writer.side.writes.at_once:  # the memory of a device is never protected
        pub._writer.side.writer.unprotect()  # as where the system refuses
    with torch.no_grad():
        trainer.head.weight.add_(1)  # outside of update()
    with pytest.raises(shmsync.NotDelivered, match=r"the arena's head.weight was written after it was published"):
        sub.verify()


def refused(sub, *leaves, match=None, modules=()):
    with pytest.raises(shmsync.NotDelivered, match=match) as caught:
        sub.verify(*modules)
    assert set(caught.value.leaves) == set(leaves)
    assert caught.value.version == sub.version
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.leaves, again.version) == (str(caught.value), caught.value.leaves, sub.version)
    return str(again)


def replaced_submodule(worker):
    worker.head = nn.Linear(8, 2)


def replaced_data(worker):
    worker.head.weight.data = torch.randn(2, 8)


def replaced_parameter(worker):
    worker.head.weight = nn.Parameter(torch.randn(2, 8))


def dropped(worker):
    del worker.head.bias


def untied(worker):
    worker.out.weight = nn.Parameter(torch.randn(8, 8))


@pytest.mark.parametrize(
    ("change", "leaves", "says"),
    [
        (replaced_submodule, ["head.weight", "head.bias"], "has other values, in private memory"),
        (replaced_data, ["head.weight"], "has other values"),
        (replaced_parameter, ["head.weight"], "has other values"),
        (dropped, ["head.bias"], "is not there"),
        (untied, ["out.weight"], "has other values"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_a_module_holds_instead_is_named(delivered, change, leaves, says):
    _, worker, _, sub = delivered()
    change(worker)
    text = refused(sub, *leaves)
    assert all(f"Agent.{leaf} {says}" in text for leaf in leaves)


def test_leaves_that_nobody_sends_are_shown(delivered):
    _, _, _, sub = delivered(exclude="head.*")
    assert sub.verify().unsent == ("head.weight", "head.bias")


@pytest.mark.parametrize("slots", [1, 3])
def test_a_copy_that_computes_in_the_modules_place(delivered, slots):
    trainer, worker, pub, sub = delivered(slots)
    stale = copy.deepcopy(worker)
    assert sub.verify(stale).leaves == leaves(trainer)  # it has this version
    changed(trainer, pub)
    assert sub.verify().version == 2
    text = refused(sub, *trainer.state_dict(), modules=[stale])
    assert ("has the value of another version" in text) == (slots > 1)


def test_another_model(delivered):
    _, _, _, sub = delivered()
    other = Agent()
    with pytest.raises(shmsync.NotDelivered, match="Agent.head.weight has other values"):
        sub.verify(other)
    with pytest.raises(shmsync.NotDelivered, match="Linear.head.weight is not there"):
        sub.verify(nn.Linear(8, 2))
    with pytest.raises(TypeError, match="takes torch.nn.Module"):
        sub.verify("policy")


def test_a_cast_that_is_fresh_and_one_that_is_stale(delivered):
    trainer, worker, pub, sub = delivered(2, factory=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    cached = copy.deepcopy(worker).to(torch.bfloat16)
    assert sub.verify(cached).leaves == 4
    changed(trainer, pub)
    text = refused(sub, *trainer.state_dict(), modules=[cached])
    assert "0.weight is not the published value cast to torch.bfloat16" in text


def test_a_buffer_that_went_its_own_way(delivered):
    trainer, worker, pub, sub = delivered()
    worker.train()
    worker(torch.randn(16, 4))
    names = {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    refused(sub, *names, match="Agent.body.1.running_mean has other values, in private memory")
    changed(trainer, pub)  # which puts it back
    assert sub.verify().version == 2


@pytest.mark.no_cuda(reason="the test writes by an address of the host")
@pytest.mark.parametrize("slots", [1, 2])
def test_bytes_that_change_after_the_publish(delivered, slots):
    _, _, pub, sub = delivered(slots)
    with pub.update() as weights:
        kept = weights["head", "weight"]
    ctypes.memset(kept.data_ptr(), 1, 4)
    refused(sub, "head.weight", match="the arena's head.weight was written after it was published")


def test_a_worker_on_an_old_session(publisher, subscriber):
    trainer = Agent()
    old = shmsync.Publisher(trainer, checksum=True)
    sub = subscriber(old)
    old.close()
    assert sub.verify().version == 1  # the last version of an arena that has ended, and has no heir
    publisher(trainer, name=old.name, checksum=True)
    with pytest.raises(shmsync.NotDelivered, match="session .* has taken its place"):
        sub.verify()


def test_a_follower_is_on_the_new_session(publisher, subscriber):
    trainer = Agent()
    old = shmsync.Publisher(trainer, checksum=True)
    sub = subscriber(old, follow=True)
    sub.bind(worker := Agent().eval())
    old.close()
    step(trainer)
    pub = publisher(trainer, name=old.name, checksum=True)
    assert sub.verify() == (1, leaves(worker), (), ())
    assert sub.session == pub.handle.session


def test_without_checksums(both):
    pub, sub = both(Agent())
    for verify in (sub.verify, pub.verify):
        with pytest.raises(shmsync.ProtocolError, match=r"has no checksums .* checksum=True"):
            verify()
    with pytest.raises(TypeError, match="checksum is True or False, not 1"):
        shmsync.Publisher(Agent(), checksum=1)


def test_checksum_false_takes_no_byte(publisher):
    assert b"sums" not in publisher(Agent())._writer.arena.manifest.to_json()


INCOMPARABLE = {
    "uninitialized": nn.UninitializedParameter,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(8)]),
    "fake": lambda: FakeTensorMode().from_tensor(torch.empty(2, 8)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 8, device="cpu"), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(2, 8, device="meta"),
}


@pytest.mark.parametrize("kind", INCOMPARABLE)
def test_a_tensor_that_cannot_be_compared_is_another_one_and_ends_no_section(delivered, kind):
    _, worker, pub, sub = delivered()
    del worker.head._parameters["weight"]
    worker.head.register_buffer("weight", INCOMPARABLE[kind]())
    refused(sub, "head.weight")
    asking = Call(pub.verify, timeout=20.0)
    while asking.is_alive():
        with contextlib.suppress(shmsync.ManifestMismatch):  # the bound module was changed
            sub.refresh()
    with pytest.raises(shmsync.NotDelivered):
        asking.result()


def test_a_worker_that_cannot_compute_checksums_says_so_and_goes_on(delivered, monkeypatch, caplog):
    _, _, pub, sub = delivered()
    asking = Call(pub.verify, timeout=20.0)
    until(lambda: sub._reader.question)
    monkeypatch.setitem(sys.modules, "xxhash", None)  # as where it is not installed
    with caplog.at_level(logging.WARNING, "shmsync"):
        while asking.is_alive():
            with sub.read() as section:
                assert section.version == pub.version
    with pytest.raises(shmsync.NotDelivered, match="could not compare what it holds, and its log says why"):
        asking.result()
    assert "shmsync[verify]" in caplog.text


def test_the_publisher_cannot_wait_for_answers_while_it_keeps_the_readers_out(delivered):
    _, _, pub, sub = delivered()
    with pytest.raises(shmsync.ProtocolError, match="leave update"), pub.update():
        pub.verify()
    pub.publish()
    assert sub.verify().version == pub.version


def test_an_interrupt_at_any_line_of_a_proof_leaves_the_next_one_possible():
    def steps(code):
        return code in (VerifyRequest.ask.__code__, VerifyRequest._answers.__code__)

    with shmsync.Publisher({"w": torch.ones(4)}, checksum=True) as pub:
        for line in itertools.count():
            with interrupt_at(line, steps, NO_HANDLER) as raised, contextlib.suppress(Interrupt):
                pub.verify()
            assert Call(pub.verify, timeout=20).result().version == 1  # in another thread
            if not raised:
                break
        assert line > 15


def test_a_second_call_while_one_waits_is_refused_with_the_version(publisher, subscriber):
    pub = publisher({"w": torch.zeros(3)}, checksum=True)
    subscriber(pub, worker=0)  # answers nothing
    waiting = Call(pub.verify, timeout=2.0)
    until_waits(waiting, "ask")
    with pytest.raises(shmsync.WriterBusy, match=r"another call of verify\(\)") as busy:
        pub.verify(timeout=0.05)
    assert busy.value.version == 1
    with pytest.raises(shmsync.AckTimeout):
        waiting.result()
