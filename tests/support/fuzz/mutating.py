"""Seeded mutations of numbers and bytes."""

from __future__ import annotations

import random

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30,
)  # fmt: skip


class Mutator:
    """Draws mutations; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self) -> int:
        """One that is at the edge of something, or near, or any."""
        drawn = self.random.choice(NUMBERS)
        if self.random.random() < 0.3:
            drawn += self.random.randint(-3, 3)
        return drawn if self.random.random() < 0.8 else self.random.getrandbits(self.random.choice((8, 16, 32, 64)))

    def of_bytes(self, data: bytes) -> bytes:
        """Some bytes changed, removed, repeated or put in."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 8))):
            at = self.random.randrange(len(changed) + 1)
            size = self.random.choice((1, 1, 2, 4, 8, 32))
            way = self.random.randrange(6)
            if way == 0:
                changed[at : at + size] = self.random.randbytes(size)
            elif way == 1:
                del changed[at : at + size]
            elif way == 2:
                changed[at:at] = changed[at : at + size] * self.random.choice((1, 2, 50))
            elif way == 3:
                width = self.random.choice((1, 2, 4, 8))
                changed[at : at + width] = (self.number() % 2 ** (8 * width)).to_bytes(
                    width, self.random.choice(("little", "big"))
                )
            elif way == 4 and at < len(changed):
                changed[at] ^= 1 << self.random.randrange(8)
            else:
                del changed[at:]
        return bytes(changed)
