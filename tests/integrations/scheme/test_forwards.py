"""What a forward sees, when an update waits for one, and that no send outlives its deadline."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import shmsync
from support.calls import Call
from support.processes import until, until_waits
from support.weights import fill as filled


class Held(nn.Linear):
    """Its forward waits for `go`."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.entered, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return filled(Held(self.in_features, self.out_features), self.weight.mean().item())

    def forward(self, x):
        self.entered.set()
        self.go.wait(10)
        return super().forward(x)


def test_nothing_moves_in_a_forward_and_everything_after_it(pair):
    class Slow(nn.Linear):
        def forward(self, x):
            before = self.weight.clone()
            started.set()
            if threading.current_thread() is not threading.main_thread():
                until_waits(threading.main_thread(), "send")
            assert torch.equal(before, self.weight)
            return super().forward(x)

    started = threading.Event()
    model = filled(Slow(2, 2), 1)
    both = pair(model)
    ended = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: ended.append(both.models[0](torch.ones(1, 2))))
        thread.start()
        started.wait()
        both.sender.send(filled(model, 2))
        thread.join()
        assert (ended[0] == 3).all(), "that forward used version 1 to its end"
        assert (both.models[0](torch.ones(1, 2)) == 6).all()


def test_an_update_that_came_in_a_forward_is_applied_when_it_ends(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2)
    end = in_forward(both.models[0])
    with pytest.raises(shmsync.AckTimeout) as late:
        both.sender.send(filled(Held(2, 2), 2), timeout=0.5)
    assert late.value.missing == [0]
    assert (both.models[1].weight == 2).all() and (both.models[0].weight == 1).all()
    assert end() == 3
    until(lambda: (both.models[0].weight == 2).all())


def test_a_long_send_ends_no_other_workers_forward(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), timeout=0.2)
    end = in_forward(both.models[0])
    sending = threading.Thread(target=both.sender.send, args=(filled(Held(2, 2), 2),), kwargs={"timeout": 5.0})
    sending.start()
    until_waits(sending, "send")
    other = in_forward(both.models[1], enters=False)  # waits at the gate, for worker 0
    time.sleep(0.5)  # longer than the scheme's timeout
    assert end() == 3
    sending.join()
    assert other() == 6


@pytest.fixture
def busy(pair, in_forward):
    """A pair whose worker is in a forward, so that sends wait; and what ends the forward."""
    made = pair(Held(2, 2), workers=1, timeout=60)
    return made, in_forward(made.models[0])


def test_it_waits_no_longer_than_its_own_deadline(busy):
    pair, end_forward = busy
    first = Call(pair.sender.send, filled(Held(2, 2), 1))
    until_waits(first, "send")
    with pytest.raises(shmsync.WriterBusy, match="another thread"):
        pair.sender.send(filled(Held(2, 2), 2), timeout=0.1)
    end_forward()
    first.result()
    assert pair.weights("weight")[0].unique().tolist() == [1]
