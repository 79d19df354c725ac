"""The reader table as Python sees it: a native Row for each subscriber, and the figures of a row that users see."""

from __future__ import annotations

from typing import Any

from ... import _native

RowId = tuple[int, int]  # (number, owner): a row, for as long as it has this owner


def figures(row: _native.Row, version: int) -> dict[str, Any]:
    """The figures of a row, by the names that ReaderInfo and ReaderSeen have for them; `version`: the published one."""
    told = {field: getattr(row, field) for field in ("worker", "pid", "acked", "pinned", "pin_age")}
    return told | {"lag": max(0, version - row.acked), "reads": row.reads, "torn": row.torn, "retries": row.retries}
