"""Workers that leave, load, are copied or interrupted, and what is left of them."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmsync
from support.torchrl.pair import net
from support.weights import fill as filled


def test_a_worker_that_leaves_is_late_and_may_come_back(pair):
    model = filled(net(), 1)
    both = pair(model)
    both.receivers[0].shutdown()
    with pytest.raises(shmsync.AckTimeout) as gone:
        both.sender.send(filled(model, 2), timeout=0.5)
    assert gone.value.missing == [0]
    assert [w.mean().item() for w in both.weights("0.weight")] == [1, 2]
    again = pickle.loads(pickle.dumps(both.sender))
    again.init_on_receiver(model=both.models[0], model_id="policy", worker_idx=0)
    again.connect(worker_idx=0)
    both.receivers.append(again)
    both.sender.send(filled(model, 4))
    assert [w.mean().item() for w in both.weights("0.weight")] == [4, 4]


def test_a_workers_own_load_state_dict_lasts_until_the_next_update(pair):
    model = filled(net(), 1)
    both = pair(model)
    both.models[0].load_state_dict(filled(net(), 5).state_dict())
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 1]
    both.receivers[1].apply_weights(TensorDict.from_module(filled(net(), 6)).data)
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 6]
    with pytest.raises(shmsync.ManifestMismatch):
        both.receivers[1].apply_weights({"0.weight": torch.zeros(5)})
    assert [w.mean().item() for w in both.weights("0.weight")] == [5, 6] and (model[0].weight == 1).all()
    both.sender.send(filled(model, 2))
    assert [w.mean().item() for w in both.weights("0.weight")] == [2, 2]
