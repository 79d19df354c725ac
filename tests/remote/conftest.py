"""Trainers and workers that speak RPC or torch.distributed. Ray's are in ray/."""

import pytest

from support.processes import remove_segments
from support.remote.fleet import Fleet


@pytest.fixture
def fleet(start):
    """fleet(kind, 2) -> a trainer and workers, see Fleet; they are killed afterwards."""
    made = []

    def new(*args, **kwargs):
        made.append(Fleet(start, *args, **kwargs))
        return made[-1]

    yield new
    for process in [process for each in made for process in (each.trainer, *each.workers)]:
        if process.process.is_alive():
            process.kill()
        remove_segments(process.pid)


@pytest.fixture(params=["rpc", "distributed"])
def kind(request):
    """What the trainer and its workers speak."""
    return request.param
