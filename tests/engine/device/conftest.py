import pytest
import torch


@pytest.fixture(autouse=True)
def tensors_are_made_in_host_memory():
    """These tests say themselves what lies on a device."""
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)
