"""The environments inside a SyncVectorEnv. A worker steps them itself, straight into its batches.

SyncVectorEnv puts their results together three times before a batch gets them, which takes longer than to step four
CartPoles. The frames are the same, since they are those of single environments whichever way they are stepped.
"""

from __future__ import annotations

from typing import Any

from gymnasium import vector


def unrolled(env: Any) -> list[Any] | None:
    """The environments of a SyncVectorEnv; None for anything that may do more in a step than to step them.

    That is each other class, a derived one too, and an object with a method of its own.
    """
    if type(env) is not vector.SyncVectorEnv or vars(env).keys() & {"step", "reset"}:
        return None
    return list(env.envs)
