"""From the rows of the benchmark of the schemes for several machines to tables."""

from __future__ import annotations

from typing import Any

from distributed_cell import BY_NODE, OURS

Row = dict[str, Any]
Table = list[list[str]]


def add_ratios(row: Row) -> None:
    """How many times as long everybody else takes as each of shmsync's ways: of the medians, and of the p99s."""
    found = row["contestants"]
    row["ratios"] = {
        ours: {
            theirs: {what: found[theirs][f"{what}_ms"] / found[ours][f"{what}_ms"] for what in ("p50", "p99")}
            for theirs in found
            if theirs not in (OURS, BY_NODE)
        }
        for ours in (OURS, BY_NODE)
    }


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["bytes"], row["nodes"], row["workers"]))


def times(rows: list[Row]) -> Table:
    names = list(rows[0]["contestants"])
    table = [["p50 / p99 of a send, ms", "workers", "nodes", *names]]
    for row in rows:
        cells = [f"{_ms(each['p50_ms'])} / {_ms(each['p99_ms'])}" for each in row["contestants"].values()]
        table.append([row["size"], str(row["workers"]), str(row["nodes"]), *cells])
    return table


def ratios(rows: list[Row], ours: str) -> Table:
    table = [[f"p50 (p99) of others / of {ours}", "workers", "nodes", *rows[0]["ratios"][ours]]]
    for row in rows:
        cells = [f"{each['p50']:.2f} ({each['p99']:.2f})" for each in row["ratios"][ours].values()]
        table.append([row["size"], str(row["workers"]), str(row["nodes"]), *cells])
    return table


def tables(rows: list[Row]) -> list[Table]:
    return [times(rows), ratios(rows, OURS), ratios(rows, BY_NODE)]


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for table in tables(rows):
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        for line in table:
            cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
            print("  ".join([f"{line[0]:{widths[0]}}", *cells]))
        print(flush=True)


def markdown(engines: dict[str, list[Row]]) -> str:
    """For docs/performance.md: three tables for each engine."""
    lines = []
    for title, rows in engines.items():
        for table in tables(ordered(rows)):
            first, *rest = (f"| {' | '.join(line)} |" for line in table)
            lines += [first.replace("| ", f"| {title}: ", 1), "|---" * len(table[0]) + "|", *rest, ""]
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
