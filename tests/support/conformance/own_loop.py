"""A worker whose own loop reads the pipe, and gives what is about weights to its receivers."""

from __future__ import annotations

from multiprocessing import connection

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
