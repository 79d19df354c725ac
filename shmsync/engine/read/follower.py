"""What a subscriber moves to each new version that it applies."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ...memory.arena import Arena


class Follower(Protocol):
    """Something that moves to each new version: a bound module, for example. It overrides what concerns it."""

    def prepare(self) -> None:
        """Called for all followers before any moves. What cannot show the next version raises."""
        return

    def move(self, slot: int) -> bool:
        """Show this slot, whose version the open section holds. False: drop this follower."""

    def owners(self) -> set[nn.Module]:
        """The modules that it moves."""
        return set()

    def rebase(self, arena: Arena) -> None:
        """From the next move() on, show this arena. Its leaves are the same, its slots and addresses are not."""
        return

    def private_copies(self) -> list[torch.Tensor]:
        """Its tensors that a move copies into."""
        return []
