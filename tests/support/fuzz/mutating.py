"""Seeded mutations: of bytes, and of what JSON has: lists, dicts, numbers and texts."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0.5, float("inf"), float("nan"), "", "t", "float32", "a.b", "\x00", "é" * 50, [], {}, [[]],
    ["t"], {"t": 1}, [1] * 100, "9" * 5000,
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

    def odd(self) -> Any:
        """Something that does not belong there."""
        if self.random.random() < 0.5:
            return self.number()
        return copy.copy(self.random.choice(ODD))

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

    def of_value(self, value: Any) -> Any:
        """The value with some of its parts changed; the value itself stays as it is."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            value = self._once(value)
        return value

    def _once(self, value: Any) -> Any:
        inside = isinstance(value, (list, dict)) and len(value) > 0
        if not inside or self.random.random() < 0.15:
            if type(value) is int and self.random.random() < 0.5:
                return value + self.random.choice((-256, -1, 1, 256, 2**31, 2**63))
            return self.odd()
        if isinstance(value, dict):
            changed: Any = dict(value)
            key = self.random.choice(list(changed))
            way = self.random.random()
            if way < 0.1:
                del changed[key]
            elif way < 0.2:
                changed[self.random.choice(("t", "", "leaves", "more"))] = changed[key]
            else:
                changed[key] = self._once(changed[key])
            return changed
        items = list(value)
        at = self.random.randrange(len(items))
        way = self.random.random()
        if way < 0.1:
            del items[at]
        elif way < 0.2:
            items.insert(at, copy.copy(items[at]))
        elif way < 0.25:
            self.random.shuffle(items)
        else:
            items[at] = self._once(items[at])
        return items
