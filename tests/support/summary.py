"""The table at the end of a run: what ran where, how long it took, and what a covering choice left out."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest


class Summary:
    """A plugin of pytest. Under pytest-xdist each worker has one too, which tells the controller what it left out."""

    def __init__(self, config):
        self.config = config
        self.left = Counter()
        self.seconds = defaultdict(float)
        self.tests = Counter()
        self.workers = defaultdict(set)

    def leave(self, items):
        self.left = Counter(folder(item.nodeid) for item in items)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left"] = dict(self.left)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.left = Counter(getattr(node, "workeroutput", {}).get("left", self.left))

    def pytest_runtest_logreport(self, report):
        where = folder(report.nodeid)
        self.seconds[where] += report.duration
        self.workers[where].add(getattr(report, "worker_id", "here"))
        if report.when == "call":
            self.tests[where] += 1

    def pytest_terminal_summary(self, terminalreporter):
        if not self.tests:
            return
        left = "test-all" if self.config.option.choice == "covering" else ""
        rows = [("folder", "tests", "seconds", "in", f"left to make {left}" if left else "")]
        for where in sorted(self.seconds, key=lambda each: -self.seconds[each]):
            workers = sorted(self.workers[where])
            more = self.left[where] if left else ""
            rows.append((where, self.tests[where], f"{self.seconds[where]:.0f}", " ".join(workers), more or ""))
        more = sum(self.left.values()) if left else ""
        rows.append(("all", sum(self.tests.values()), f"{sum(self.seconds.values()):.0f}", "", more))
        terminalreporter.section("what ran where")
        for name, tests, seconds, workers, more in rows:
            terminalreporter.write_line(f"{name:28}{tests!s:>7}{seconds!s:>9}  {workers:18}{more!s}".rstrip())


def folder(nodeid):
    """Of a test, below tests/."""
    return nodeid.partition("::")[0].rpartition("/")[0].rpartition("tests/")[2] or "tests"
