"""What processes do in test_remote_threads.py: the same thing in several threads at once."""

from __future__ import annotations

import copy
import time

from support.calls import Call
from support.remote.members import linear
from support.weights import fill


def all_at_once(*functions):
    """Run these, each on a thread; what each of them returned. The first exception of them raises."""
    return [call.result() for call in [Call(function) for function in functions]]


def repeated(call, rounds):
    """A function that makes the call so often: what it raised."""

    def run():
        raised = []
        for number in range(rounds):
            try:
                call(number)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
        return raised

    return run


def filled(state, value):
    """A copy of the trainer's model that is this value everywhere."""
    return fill(copy.deepcopy(state.model), value)


def send_over_one_transport(state, count, rounds):
    """One transport without a sender, in so many threads."""
    weights = filled(state, 5.0).state_dict()
    call = repeated(lambda _: state.transport.send_weights("policy", weights), rounds)
    return all_at_once(*[call] * count)


def send_two_models(state, rounds):
    """Two senders, each on a separate thread, over one store and one process group."""
    one, other = state.senders

    def call(sender, size):
        return repeated(lambda number: sender.send(linear(size, float(number))), rounds)

    return all_at_once(call(one, 500), call(other, 300))


def refuse_in_the_same_thread(state):
    """A call of a transport from inside a call of it, as a signal handler makes it: the name of what it raises."""
    names = []

    class Weights(dict):
        def items(self):
            if not names:
                try:
                    state.transport.send_weights("policy", state.model.state_dict())
                except Exception as error:
                    names.append(type(error).__name__)
                else:
                    names.append("nothing")
            return super().items()

    state.transport.send_weights("policy", Weights(filled(state, 7.0).state_dict()))
    return names


def receive_in_threads(state, seconds):
    """Two threads receive by hand, with one transport, as long as this lasts; how many messages they took."""
    until = time.monotonic() + seconds

    def receive():
        taken = 0
        while time.monotonic() < until:
            if state.transport.receive_weights(0.05) is not None:
                taken += 1
                state.transport.send_ack()
        return taken

    return sum(all_at_once(receive, receive))
