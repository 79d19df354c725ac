import pytest

from shmsync.memory.cuda import visible
from support.devices.standin_cuda import Proxy


@pytest.fixture
def process(monkeypatch):
    """process(world, visible) -> the calls of this process, from now on."""

    def become(world, visible_gpus=(0,)):
        calls = Proxy(world, visible_gpus)
        monkeypatch.setattr(visible, "system", lambda: (calls, calls.side))
        visible._used.cache_clear()
        return calls

    yield become
    visible._used.cache_clear()
