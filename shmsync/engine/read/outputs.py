"""What a guarded call returns: nothing in it may change after the section has ended."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ProtocolError
from ...memory.dynamo import skip
from .reachable import Reach, Test


@skip
def unalias(out: Any, aliases: Test, given: tuple[Any, ...] = ()) -> Any:
    """The output with a copy in place of everything that lies in the arena; itself if there is none.

    What holds such a thing is copied too, since it may be the module's own list or object; a TensorDict that was among
    the arguments is written into. What was one object twice stays one. Raises ProtocolError for what holds memory of
    the arena and cannot be copied.
    """
    if type(out) is torch.Tensor and not aliases(out) and out.layout is torch.strided and not out.is_nested:
        return out
    reach = Reach(aliases, given)
    if not reach.finds(out):
        return out
    made = reach.copy(out)
    if Reach(aliases, given).finds(made):
        raise ProtocolError(
            f"the {type(out).__name__} that was returned holds views of the weights even in a copy of it; return "
            "tensors, or clone() what it keeps"
        )
    return made


@skip
def unalias_error(error: BaseException, aliases: Test) -> None:
    """Let an error that leaves a section hold copies of what lies in the arena. It stays the same object."""
    args = unalias(error.args, aliases)
    if args is not error.args:
        error.args = args
    if isinstance(error, StopIteration):
        error.value = unalias(error.value, aliases)
    attributes = vars(error)
    made = unalias(attributes, aliases)
    if made is not attributes:
        attributes.update(made)
