"""Arguments of the scheme: each does something, or is refused before anything is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.pair import net
from support.weights import fill as filled


def test_unknown_keyword_arguments_are_errors(pair):
    with pytest.raises(TypeError, match="slot"):
        ShmWeightSyncScheme(slot=2)
    scheme = ShmWeightSyncScheme()
    with pytest.raises(TypeError, match="modle"):
        scheme.init_on_sender(model_id="policy", modle=net(), devices=["cpu"])
    assert not scheme.initialized_on_sender
    with pytest.raises(TypeError, match="modle"):
        scheme.init_on_receiver(model_id="policy", modle=net(), worker_idx=0)
    assert not scheme.initialized_on_receiver
    made = pair(net(), workers=1)
    with pytest.raises(TypeError, match="workers"):
        made.sender.send(net(), workers=[0])
    with pytest.raises(TypeError, match="worker"):
        ShmWeightSyncScheme().connect(worker=0)


@pytest.mark.parametrize(("dtype", "slots"), [(torch.bfloat16, 1), ({"*": torch.bfloat16}, 2)])
def test_workers_in_another_dtype_get_cast_values(pair, dtype, slots):
    trainer = nn.Linear(2, 2)
    models = [nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2)]
    made = pair(trainer, models=models, dtype=dtype, slots=slots, timeout=20)
    assert all(torch.equal(own.weight, trainer.weight.to(torch.bfloat16)) for own in made.models)
    filled(trainer, 1 / 3)
    made.sender.send(trainer)
    for own in made.models:
        assert own.weight.dtype is torch.bfloat16 and torch.equal(own.weight, trainer.weight.to(torch.bfloat16))
    assert trainer.weight.dtype is torch.float32 and trainer.weight.unique().tolist() == [pytest.approx(1 / 3)]
