"""The policy of a storm over TorchRL's collectors."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase

from support.storms.model import FINE, Weather


class Forecaster(TensorDictModuleBase):
    """Says in each frame which weights it saw; less than 0 when they were not of one number."""

    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "forecast"]
        self.weather = Weather()

    def become(self, number):
        self.weather.become(number)

    def forward(self, tensordict):
        number, _, matter, _ = self.weather()
        ones = torch.ones_like(tensordict["observation"])
        return tensordict.update({"action": ones, "forecast": ones * (number if matter == FINE else -matter)})
