"""A trainer and its workers in one process, and models to send."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from shmsync.integrations.torchrl import ShmWeightSyncScheme


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Pair:
    """A trainer's scheme, and a receiver's for each worker, in this process. `models`: the workers', unless they are
    copies of the trainer's; `lie`: where these copies are, else where the trainer's is."""

    def __init__(self, model, workers=2, models=None, lie=None, **options):
        start = options.pop("start", None) or {"model": model, "devices": [None] * workers}
        self.sender = ShmWeightSyncScheme(**{"timeout": 5.0, **options})
        self.sender.init_on_sender(model_id="policy", **start)
        self.receivers = [pickle.loads(pickle.dumps(self.sender)) for _ in range(workers)]
        self.models = [copy.deepcopy(model) for _ in range(workers)] if models is None else models
        if lie is not None:
            self.models = [own.to(place or "cpu") for own, place in zip(self.models, lie, strict=True)]
        self.sender.connect()
        for index, (receiver, own) in enumerate(zip(self.receivers, self.models, strict=True)):
            for tensor in own.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
            receiver.init_on_receiver(model=own, model_id="policy", worker_idx=index)
            receiver.connect(worker_idx=index)

    def weights(self, name):
        return [own.state_dict()[name].clone() for own in self.models]

    def close(self):
        for scheme in (*self.receivers, self.sender):
            scheme.shutdown()
