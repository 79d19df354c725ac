"""Trainers and workers that speak RPC or torch.distributed. Ray's are in ray/."""

import pytest

from support.remote import parts


@pytest.fixture
def fleet(start):
    """fleet(2, nodes=...) -> a trainer and workers, see parts.Fleet; they are dead afterwards."""
    made = []

    def new(*args, **kwargs):
        made.append(parts.Fleet(start, *args, **kwargs))
        return made[-1]

    yield new
    for each in made:
        each.end()


@pytest.fixture(params=["rpc", "distributed"])
def kind(request):
    """What the trainer and its workers speak."""
    return request.param
