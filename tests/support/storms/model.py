"""Weights whose every element can be computed again from one number, and a model whose forward does so."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

SIZES = (3, 64, 4096, 65536)  # elements: a tear of one update is most likely to be seen in the largest
FINE, TORN, WRONG = 0, 1, 2
PRIME = 65521  # so that every value is exact in float32


@lru_cache(maxsize=64)
def leaf(number, index):
    """What this leaf holds in the weights of this number."""
    elements = torch.arange(SIZES[index], dtype=torch.int64)
    return ((elements * (index + 3) + number * 7919 + index * 104729) % PRIME).float()


def element(number, index, place):
    """One element of that leaf."""
    return float((place * (index + 3) + number * 7919 + index * 104729) % PRIME)


GLANCE = (0, 63, 2048, 65535)  # the places of leaves that a glance looks at


class Weather(nn.Module):
    """Its forward returns (number, what is the matter): all leaves must be those of one number."""

    def __init__(self, number=0):
        super().__init__()
        self.leaves = nn.ParameterList([torch.empty(size) for size in SIZES])
        self.register_buffer("number", torch.zeros(1, dtype=torch.int64))
        self.become(number)

    def become(self, number):
        with torch.no_grad():
            for index, each in enumerate(self.leaves):
                each.copy_(leaf(number, index))
            self.number.fill_(number)
        return self

    def forward(self, places=None):
        """`places`: look at these elements of each leaf alone."""
        with torch.no_grad():
            number = int(self.number)
            for index, each in enumerate(self.leaves):
                if not (
                    torch.equal(each.detach(), leaf(number, index))
                    if places is None
                    else float(each[places[index]]) == element(number, index, places[index])
                ):
                    return number, self._matter(number, index)
            return number, FINE

    def _matter(self, number, index):
        """Is it made of other updates, or of nothing that was ever sent?"""
        found = self.leaves[index].detach()
        near = [leaf(other, index) for other in range(max(0, number - 100), number + 100)]
        known = torch.stack(near).eq(found).any(dim=0).all()
        return TORN if bool(known) else WRONG
