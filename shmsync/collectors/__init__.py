"""Collectors: worker processes that act with the newest policy, and hand their frames over in shared memory."""

try:
    import cloudpickle as _cloudpickle  # noqa: F401
    import gymnasium as _gymnasium  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shmsync.collectors needs Gymnasium; install it with: pip install 'shmsync[collectors]'"
    ) from error

from .collector import CollectorStats, MultiprocessCollector

__all__ = ["CollectorStats", "MultiprocessCollector"]
