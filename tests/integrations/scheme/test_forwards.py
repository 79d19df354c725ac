"""What a forward sees, and when an update waits for one."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import shmsync
from support.processes import until_waits
from support.torchrl.pair import Held, filled, net


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


def test_a_forward_of_one_model_does_not_hold_up_another(pair, in_forward):
    policy, value = pair(filled(Held(2, 2), 1), workers=1), pair(filled(net(), 1), workers=1)
    end = in_forward(policy.models[0])
    value.sender.send(filled(net(), 2))  # one thread serves both
    policy.sender.sync = False
    with pytest.raises(shmsync.ReaderStalled):
        policy.sender.send(filled(Held(2, 2), 2), timeout=0.2)
    assert end() == 3
    policy.sender.send(filled(Held(2, 2), 2))
    assert (value.models[0][0].weight == 2).all()


def test_an_update_that_came_in_a_forward_is_applied_when_it_ends(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2)
    end = in_forward(both.models[0])
    with pytest.raises(shmsync.AckTimeout) as late:
        both.sender.send(filled(Held(2, 2), 2), timeout=0.3)
    assert late.value.missing == [0]
    assert (both.models[1].weight == 2).all() and (both.models[0].weight == 1).all()
    assert end() == 3
    assert (both.models[0].weight == 2).all()


def test_a_worker_that_has_not_moved_yet_never_sees_the_weights_of_others(pair, in_forward):
    both = pair(filled(Held(2, 2), 1), slots=2, sync=False)
    end = in_forward(both.models[0])
    both.sender.send(filled(Held(2, 2), 100), worker_ids=[0])
    both.sender.send(filled(Held(2, 2), 7), worker_ids=[1])
    assert end() == 3
    with torch.no_grad():
        assert both.models[0](torch.ones(1, 2)).mean() == 300


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


@pytest.mark.parametrize("raises", [False, True])
def test_an_update_that_came_in_somebody_elses_turn_is_applied_after_it(pair, raises):
    class Slow(nn.Linear):
        def forward(self, x):
            entered.set()
            until_waits(threading.main_thread(), "send")
            raise ArithmeticError

        def _load_from_state_dict(self, *args, **kwargs):
            entered.set()
            until_waits(threading.main_thread(), "send")
            super()._load_from_state_dict(*args, **kwargs)

    entered = threading.Event()
    both = pair(filled(Slow(2, 2), 1), slots=2)
    own = both.models[0]

    def use():
        if raises:
            with pytest.raises(ArithmeticError), torch.no_grad():
                own(torch.ones(1, 2))
        else:
            own.load_state_dict(filled(nn.Linear(2, 2), 9).state_dict())

    user = threading.Thread(target=use)
    user.start()
    entered.wait()
    both.sender.send(filled(nn.Linear(2, 2), 2))
    user.join()
    assert (own.weight == 2).all()


def test_outputs_do_not_change_later(pair):
    class Shows(nn.Linear):
        def forward(self, x):
            return {"weight": self.weight, "copies": [self.bias[None], self.buffer[0]]}

    model = Shows(2, 2)
    model.register_buffer("buffer", torch.ones(2))
    filled(model, 1)
    both = pair(model)
    with torch.no_grad():
        out = both.models[0](None)
    both.sender.send(filled(model, 2))
    assert (out["weight"] == 1).all() and (out["copies"][0] == 1).all() and out["copies"][1] == 1
