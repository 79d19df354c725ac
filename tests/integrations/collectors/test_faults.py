"""What docs/coming-from-torchrl.md says of TorchRL's own shared-memory scheme. The files beside test what ours does.

It runs in a separate process, since it hangs. `make bench BENCH=torchrl` counts its torn frames, files and threads.
"""

from __future__ import annotations

import os
import signal

import torch
from tensordict import TensorDict
from torchrl.collectors import MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightStrategy
from torchrl.weight_update import weight_sync_schemes as torchrls

from support.torchrl import children, parts, policies
from support.torchrl.children import HANGS
from support.torchrl.environments import Critic, Steps
from support.torchrl.parts import ask
from support.torchrl.policies import Tagged

PATIENCE = 4  # seconds after which an update that takes milliseconds is said to hang


def collector(policy, *, schemes=None, **options):
    schemes = schemes or {"policy": SharedMemWeightSyncScheme()}
    with parts.starting():
        return MultiSyncCollector(
            [Steps] * 2, policy, weight_sync_schemes=schemes, frames_per_batch=20, total_frames=-1, **options
        )


def said(scenario, patience=None):
    """What a scenario says, after it has said that it is ready."""
    with children.child(scenario) as child:
        assert child.hear() == "ready"
        return child.hear(patience)


# ---- an update does not return


def update_after_a_death(say):
    collecting = collector(Tagged())
    os.kill(collecting.procs[1].pid, signal.SIGKILL)
    collecting.procs[1].join()
    say("ready")
    collecting.update_policy_weights_(Tagged(1))


def test_a_worker_was_killed():
    assert said(update_after_a_death, PATIENCE) == HANGS


def update_that_fails_in_the_worker(say):
    policy = policies.Fragile()
    sending = SharedMemWeightSyncScheme()
    weights = WeightStrategy().extract_weights(policy)
    sending.init_on_sender(weights=weights, devices=[torch.device("cpu")] * 2, model_id="policy")
    collecting = collector(policy, schemes={"policy": sending})
    policy.broken.fill_(True)
    say("ready")
    collecting.update_policy_weights_(WeightStrategy().extract_weights(policy))


def test_a_worker_raised_while_it_applied():
    assert said(update_that_fails_in_the_worker, PATIENCE) == HANGS


def second_model(say):
    critic = SharedMemWeightSyncScheme()
    critic.init_on_sender(model=Critic(1), devices=[torch.device("cpu")] * 2, model_id="env.critic")
    say("ready")
    collecting = collector(Tagged(), schemes={"policy": SharedMemWeightSyncScheme(), "env.critic": critic})
    collecting.update_policy_weights_(Critic(2), model_id="env.critic")
    say(ask(collecting, "env.critic.read"))


def test_there_is_a_second_model():
    hangs = hasattr(torchrls, "register_weight_sync_backend")  # TorchRL 0.13 does not
    assert said(second_model, PATIENCE if hangs else None) == (HANGS if hangs else [2, 2])


# ---- an update does something else than it should


def half_fitting_update(say):
    policy = Tagged(1)
    collecting = collector(policy)
    say("ready")
    weights = TensorDict({"layers": {"0": torch.full((4,), 9.0), "1": torch.full((5,), 9.0)}})
    try:
        collecting.update_policy_weights_(weights)
    except Exception:
        where = [policy.read(), *ask(collecting, "policy.read")]
        say([[float(each[f"layers.{n}"][0]) for n in (0, 1)] for each in where])


def test_the_second_of_two_weights_does_not_fit():
    assert said(half_fitting_update) == [[9, 1]] * 3  # in the trainer and in both workers


def update_of_one_worker(say):
    collecting = collector(Tagged())
    say("ready")
    collecting.update_policy_weights_(Tagged(1), worker_ids=[0])
    say(parts.tags(collecting))


def test_an_update_is_for_one_worker():
    assert said(update_of_one_worker) == [1, 1]
