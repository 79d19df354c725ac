"""A worker's own recv() loop: receiver.apply_weights() takes whatever came, and answers."""

from multiprocessing import connection

import pytest

from shmsync.errors import ManifestMismatch
from support.conformance.nets import Stamped
from support.worker import nothing

WORDS = ("update_weights", "register_shared_weights")


def loop(state, form, model_id=None):
    """Until the test calls. What came besides, and what apply_weights() raised.

    `form`: what of each message apply_weights() gets. `model_id`: whose receiver gets all of them.
    """
    others = []
    while state.pipe in connection.wait([state.conn, state.pipe]):
        message = state.pipe.recv()
        if not (isinstance(message, tuple) and message[1] in WORDS):
            others.append(message)
            continue
        pair, _ = message
        given = {"message": message, "pair": pair, "content": pair[1]}[form]
        try:
            state.receivers[pair[0] if model_id is None else model_id].apply_weights(given)
        except Exception as error:
            others.append(f"{type(error).__name__}: {error}")
    return others


FORMS = ["message", "pair", "content"]


def begin(fleet, form="message", model_id=None):
    """From now on the workers' own loops read the pipes."""
    fleet.hold()
    for worker in fleet.workers:
        worker.start(loop, form, model_id)


def end(fleet):
    """What the loops have kept."""
    return [worker.interrupt(nothing) for worker in fleet.workers]


@pytest.mark.parametrize("form", FORMS)
def test_loop_of_the_workers_own_applies_and_answers(fleet, form):
    sender = fleet.open()
    begin(fleet, form)
    for value in (1, 2, 3):
        assert sender.send(Stamped(value), timeout=60) == value
    fleet.pipes[1].send("hello")
    assert end(fleet) == [[], ["hello"], []]
    assert fleet.stamps() == [3, 3, 3]


def test_what_a_loop_cannot_apply_raises_there_and_in_the_sender(fleet):
    sender = fleet.open("policy", Stamped, 0, 9)  # the workers' models are wider
    begin(fleet)
    with pytest.raises(ManifestMismatch, match=r"layer\.weight"):
        sender.send(Stamped(1), timeout=60)
    for errors in end(fleet):
        assert errors and all("layer.weight" in error for error in errors)
    assert fleet.stamps() == [0, 0, 0]


def test_one_receiver_serves_every_model_of_its_pipe(fleet):
    first, second = fleet.open("policy"), fleet.open("env.value_net")
    begin(fleet, "pair", "policy")
    first.send(Stamped(1), timeout=60)
    second.send(Stamped(2), timeout=60)
    assert end(fleet) == [[], [], []]
    assert (fleet.stamps("policy"), fleet.stamps("env.value_net")) == ([1] * 3, [2] * 3)
