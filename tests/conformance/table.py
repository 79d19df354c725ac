"""The schemes that the conformance suite runs over: each joins by one line of SCHEMES."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from fleet import PipeFleet

from shmsync.schemes import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme

ALONE = {"groups": [[0], [1], [2]]}  # three workers, none of which shares anything with another


class Entry(NamedTuple):
    """A scheme under test.

    make: makes one; takes the scheme's own options, such as `timeout=`.
    fleet: connects it with workers; what the tests need of it is in PipeFleet.
    alone: options with which each worker can be reached without the others.
    """

    name: str
    make: Callable[..., Any]
    fleet: Any = PipeFleet
    alone: dict[str, Any] = {}  # noqa: RUF012


MP = Entry("mp", MultiProcessWeightSyncScheme)
SHM = Entry("shm", SharedMemWeightSyncScheme, alone=ALONE)
NONE = Entry("none", NoWeightSyncScheme)  # it sends nothing, so only what holds for every call holds for it

SCHEMES = [
    MP,
    Entry("mp-tensordict", partial(MultiProcessWeightSyncScheme, "tensordict")),
    SHM,
    Entry("shm-two-slots", partial(SharedMemWeightSyncScheme, strategy="state_dict", slots=2), alone=ALONE),
    Entry("shm-optimistic", partial(SharedMemWeightSyncScheme, consistency="optimistic"), alone=ALONE),
]


def only(entry: Entry) -> Any:
    """A mark: the test is about this scheme alone."""
    return pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name)])


def start_methods(*names: str) -> Any:
    """A mark: workers of these start methods will do, as the test kills many or depends on nothing else."""
    return pytest.mark.parametrize("crew", names, indirect=True)
