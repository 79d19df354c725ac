"""Arguments of the scheme: each does something, or is refused before anything is changed."""

from __future__ import annotations

import pytest

from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.torchrl.pair import net


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
