"""Ctrl-C at any moment of a call: every connection stays usable, and the next send is applied with exact values."""

from __future__ import annotations

import pytest

from support.processes import until
from support.remote import members, parts, storms, transports
from support.worker import nothing


@pytest.mark.parametrize("how", ["send", "send_async"])
@pytest.mark.parametrize("fan_out", [None, "node"])
def test_in_a_send(fleet, kind, fan_out, how):
    group = fleet(2, nodes=["a", "b"], home="a").connect(kind).open(fan_out=fan_out)
    assert group.trainer.call(storms.storm_of_sends, how) == []
    if how == "send_async":
        group.trainer.call(parts.settle)
    assert group.trainer.call(parts.dead) == []
    version = group.send(0.5)
    assert group.look() == [(0.5, version)] * 2


def test_in_a_send_of_a_transport(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport()
    assert group.trainer.call(storms.storm_at_a_transport) == []
    version = group.send(0.5)
    assert group.look() == [(0.5, version)]


def test_in_receive(fleet):
    group = fleet(1).connect("distributed").open(loop=False)
    (worker,) = group.workers
    group.trainer.start(parts.send_until_told, 1)
    others, versions = worker.call(storms.storm_of_receipts)
    group.trainer.conn.send((nothing, (), {}))
    while not group.trainer.conn.poll():
        worker.call(members.receive, 0.1)
    sent, errors = group.trainer.result()
    group.trainer.result()
    assert others == []
    assert versions == sorted(versions) and versions[-1] > 20
    # The answer to weights whose receipt was interrupted while it copied them is the interrupt.
    assert all("KeyboardInterrupt" in error for error in errors)
    group.trainer.start(parts.send, 0.5)
    assert worker.call(members.receive, members.FOR_EVER)
    assert group.look() == [(0.5, group.trainer.result())]
    assert group.look()[0][1] > sent


@pytest.mark.parametrize("side", ["the sender", "the worker"])
def test_in_initial_weights(fleet, side):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    group.trainer.call(storms.make_model)
    interrupted, call = {
        "the sender": (group.trainer, storms.storm_of_initial_weights),
        "the worker": (worker, storms.storm_of_initial_receipts),
    }[side]
    interrupted.call(transports.open_transport, 1, timeout=0.1)
    assert interrupted.call(call) == []
    for each in group.everybody:
        each.call(transports.open_transport, 1, timeout=members.FOR_EVER)
    for value in (0.5, 0.25):
        worker.start(transports.receive_initial_values)
        group.trainer.call(storms.send_initial, value)
        assert worker.result() == {value}
    worker.call(transports.open_transport, 1, timeout=0.3)
    with pytest.raises(TimeoutError):  # no receiver gets what was interrupted
        worker.call(transports.receive_initial)


def test_in_init_on_sender_and_shutdown(fleet):
    group = fleet(1).connect("distributed").open()
    others, before = group.trainer.call(storms.storm_of_beginnings)
    assert others == []
    until(lambda: group.trainer.call(parts.threads) <= before + 1)  # that of the store, which all of them share
    assert group.send(0.5) == 1
    assert group.look() == [(0.5, 1)]
