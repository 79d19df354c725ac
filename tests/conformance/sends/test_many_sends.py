"""10,000 sends of two models to random workers: at the end everything agrees."""

import random

import pytest

from support.choice import first
from support.conformance.nets import Stamped, stamp
from support.conformance.table import MP, SHM, in_processes

SENDS = 10_000


@pytest.mark.parametrize("entry", first([SHM, MP]), ids=lambda entry: entry.name)
@in_processes
def test_acks_versions_and_weights_agree_after_ten_thousand_sends(fleet):
    models = ("policy", "env.value_net")
    senders = {model_id: fleet.open(model_id, alone=True, timeout=60) for model_id in models}
    nets = {model_id: Stamped() for model_id in models}
    stamps = {model_id: [0, 0, 0] for model_id in models}
    versions = {model_id: [0, 0, 0] for model_id in models}
    choose = random.Random(0)
    for number in range(1, SENDS + 1):
        model_id = models[number % 2]
        workers = choose.sample(range(3), choose.randint(1, 3))
        version = senders[model_id].send(stamp(nets[model_id], number), workers)
        assert version == (number + 1) // 2
        for index in workers:
            stamps[model_id][index], versions[model_id][index] = number, version
        if number % 1000 == 0:
            assert {model_id: fleet.stamps(model_id) for model_id in models} == stamps
    assert {model_id: fleet.stamps(model_id) for model_id in models} == stamps
    assert {model_id: fleet.versions(model_id) for model_id in models} == versions
    for index, pipe in enumerate(fleet.pipes):
        assert not pipe.poll()  # every ack was counted for its own send
        assert fleet.pending(index) == []
    for model_id in models:
        with pytest.raises(RuntimeError, match="no send is pending"):
            senders[model_id].wait_async()
