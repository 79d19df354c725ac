"""What a read section hands out beside its TensorDict: a stamp of its version, and its leaves as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import ProtocolError

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class VersionStamp(NamedTuple):
    """Which weights a read section used. Equal for two sections that used the same version of the same publisher.

    Attributes:
        session: the random id of the publisher's life; empty before the section was entered.
        version: the number of the version.
    """

    session: bytes
    version: int


def arrays_of(weights: TensorDictBase) -> dict[str, Any]:
    """The leaves by dotted key, as numpy arrays over the same memory that numpy refuses to write.

    Raises ProtocolError for leaves that are not in the host's memory, and for a dtype that numpy lacks.
    """
    return {
        ".".join((key,) if isinstance(key, str) else key): _array(key, leaf)
        for key, leaf in weights.items(include_nested=True, leaves_only=True)
    }


def _array(key: Any, leaf: torch.Tensor) -> Any:
    try:
        array = leaf.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise ProtocolError(
            f"{key!r} is {leaf.dtype} on {leaf.device}, which numpy cannot show: {error}. Use section.weights, or "
            "publish it with dtype= and device=None"
        ) from error
    array.setflags(write=False)  # for good: the memory is not numpy's own, so numpy never allows writes again
    return array
