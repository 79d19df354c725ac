"""The reader table as Python sees it: a native Row for each subscriber, and what is said of one."""

from __future__ import annotations

from typing import Any

from ... import _native

RowId = tuple[int, int]  # (number, owner): a row, for as long as it has this owner


def figures(row: _native.Row, version: int) -> dict[str, Any]:
    """What observers are told of a row, by the names of their fields; `version` is the published one."""
    told = {field: getattr(row, field) for field in ("worker", "pid", "acked", "pinned", "pin_age")}
    return told | {"lag": max(0, version - row.acked), "reads": row.reads, "torn": row.torn, "retries": row.retries}
