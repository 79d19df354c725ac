"""NVIDIA GPUs as devices on which an arena lies. CUDA is not imported before a GPU is asked for.

device() gives a GPU by its number in this process, holder() the one whose memory a handle is about; refused() says why
there is none.
May be imported by memory and cli.
"""

from .visible import device, holder
from .visible import reason as refused

__all__ = ["device", "holder", "refused"]
