"""Recurrent policies of TorchRL, and what their frames must show."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import Compose, InitTracker, TensorDictPrimer, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule

from support.torchrl.environments import Steps
from support.torchrl.policies import Readable

SIZE = 3
KINDS = ["LSTM", "GRU", "python LSTM", "python GRU", "nn.LSTM", "nn.GRU"]


class Recurrent(Readable, TensorDictSequential):
    """A recurrent module and a linear one: from the observation, and its own state, to the action."""

    def __init__(self, kind):
        if kind.startswith("nn."):
            body = _own(kind)
        else:
            made = LSTMModule if kind.endswith("LSTM") else GRUModule
            body = made(
                input_size=1, hidden_size=SIZE, num_layers=2, in_key="observation", out_key="embedding",
                python_based=kind.startswith("python"),
            )  # fmt: skip
        super().__init__(body, TensorDictModule(nn.Linear(SIZE, 1), in_keys=["embedding"], out_keys=["action"]))
        self.states = [key for key in body.out_keys if key != "embedding" and key[0] == "next"]

    def set(self, number):
        """The weights of this update."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


class Step(nn.Module):
    """One step of torch's own recurrent module; a new episode begins with a state of zeros."""

    def __init__(self, kind):
        super().__init__()
        self.net = kind(1, SIZE)

    def forward(self, observation, is_init, *states):
        states = [torch.where(is_init, torch.zeros_like(state), state) for state in states]
        given = tuple(state.unsqueeze(-2) for state in states)
        out, new = self.net(observation.unsqueeze(-2), given if len(given) > 1 else given[0])
        return out.squeeze(-2), *(each.squeeze(-2) for each in (new if isinstance(new, tuple) else (new,)))


def _own(kind):
    keys = ["h", "c"] if kind == "nn.LSTM" else ["h"]
    module = Step(nn.LSTM if kind == "nn.LSTM" else nn.GRU)
    return TensorDictModule(
        module, in_keys=["observation", "is_init", *keys], out_keys=["embedding", *(("next", key) for key in keys)]
    )


class Environment:
    """Makes environments that keep the policy's state."""

    def __init__(self, policy):
        self._primers = (
            [policy[0].make_tensordict_primer()]
            if hasattr(policy[0], "make_tensordict_primer")
            else [TensorDictPrimer({key[-1]: Unbounded((SIZE,)) for key in policy.states})]
        )

    def __call__(self):
        return TransformedEnv(Steps(), Compose(InitTracker(), *(primer.clone() for primer in self._primers)))


class Judge:
    """Looks at each frame: its policy's output is that of the weights whose version it gives, and in a trajectory the
    state goes on from frame to frame."""

    def __init__(self, kind):
        self._policy = Recurrent(kind)
        self._last = {}  # by trajectory, its last frame
        self.versions = set()
        self.over_updates = 0  # frames whose state comes from an earlier version

    @torch.no_grad()
    def look(self, batch):
        for frame in batch.reshape(-1).unbind(0):
            version, trajectory = int(frame["policy_version"]), int(frame["collector", "traj_ids"])
            assert version == int(frame["next", "policy_version"])
            before = self._last.get(trajectory)
            assert bool(frame["is_init"]) == (before is None)
            for key in self._policy.states:
                if before is None:
                    assert not frame[key[1:]].any()
                else:
                    assert torch.equal(frame[key[1:]], before[key]), (key, version)
            self.over_updates += before is not None and version != int(before["policy_version"])
            self._policy.set(version)
            found = self._policy(frame.exclude("next", "action", "embedding"))
            for key in ["action", *self._policy.states]:
                assert torch.equal(found[key], frame[key]), (key, version)
            self._last[trajectory] = frame
            self.versions.add(version)


def collected(collecting, policy, kind, updates=4):
    """Updates a collector between its batches, and looks at all frames."""
    judge = Judge(kind)
    batches = iter(collecting)
    sent = 0
    while len(judge.versions) < updates or not judge.over_updates:
        judge.look(next(batches))
        sent += 1
        policy.set(sent)
        collecting.update_policy_weights_()
    return judge
