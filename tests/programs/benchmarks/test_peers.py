"""The contest of the peers, run as `make bench BENCH=peers` does, with small weights: no figure is judged here."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from support.programs.benchmarks import BENCH, MACHINE, check_paste, run, say, statuses

pytestmark = pytest.mark.full  # a benchmark's own code; each test starts it
ROOT = BENCH.parent
PAGES = ("docs/performance.md", "docs/comparison.md")
OURS, LOCK = "shmsync, publish(), slots=1", "share_memory(), a lock and a copy"


def cell(peer, **values):
    figures = {"p50": 2e-3, "p90": 3e-3, "beside": 1e-3, "processor": 4e-3, "memory": 5.0, "descriptors": 6.0,
               "start": 7.0, "rounds": 8.0}  # fmt: skip
    return {"peer": peer, "size": "1 MB in 14 tensors", "workers": 4, "trouble": "", **figures, **values}


def earlier(tmp_path, *cells, name="earlier", **deaths):
    """The file of a run that gave these."""
    path = tmp_path / f"{name}.json"
    found = {"machine": MACHINE, "cells": cells, "deaths": deaths, "missing": {"Ray": "not installed: ray"}}
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize("peers", ["lock", pytest.param("", marks=pytest.mark.slow)])
def test_peers_take_turns_and_a_killed_reader_blocks_those_with_a_lock(tmp_path, peers):
    done = run(BENCH / "peers.py", "--simple", "--peers", peers, "--sizes", "KB", "--workers", 2, "--seconds", 0.3,
               "--patience", 3, "--out", tmp_path, cwd="/")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    names = {each["peer"] for each in found["cells"]}
    assert names >= {OURS, LOCK}
    for each in found["cells"]:
        assert each["trouble"] == "" and each["rounds"] >= 3
        assert min(each[name] for name in ("p50", "p90", "beside", "processor", "memory", "descriptors", "start")) > 0
    assert set(found["deaths"]) == names
    assert found["deaths"][LOCK]["others"] == "still blocked after 3 s, when the benchmark ended it"
    assert found["deaths"][OURS]["others"] == "have it" and found["deaths"][OURS]["raised"] == ""
    written = (tmp_path / "peers.md").read_text()
    assert [name for name in names if f"| {name} | " not in written] == []


TORN = """
import torch
from peers.shared import Unlocked
from peers.trainer import PeerTrainer

class Torn(Unlocked):
    \"\"\"One element keeps the value of the version before.\"\"\"

    def prepare(self, value):
        last = float(self.leaves[-1][-1])
        super().prepare(value)
        if value == 4.0:
            self.leaves[-1][-1] = last

if __name__ == "__main__":
    peer = PeerTrainer(Torn)
    peer.open("4 KB in 4 tensors", 1)
    try:
        peer.turn(60.0)
    except AssertionError as error:
        print(error)
    peer.close()
"""


def test_one_element_of_another_version_fails_the_run(tmp_path):
    assert say(tmp_path, TORN) == "WRONG: workers computed [(3.0, 4.0)], the weights are all 4.0\n"


def test_a_lacking_package_is_named_with_how_to_install_it(tmp_path):
    program = """
from peers import contest
contest.PEERS["odd"] = contest.Peer("odd:Odd", "no_such_package")
contest.PEERS["apart"] = contest.Peer("odd:Odd", "no_such_package", "no-such-folder")
print(contest.absence("odd"), contest.absence("apart"), contest.absence(contest.OURS), sep="; ")
"""
    odd, apart, ours = say(tmp_path, program).split("; ")
    assert odd == "not installed: no_such_package (pip install -c constraints.txt no_such_package)"
    assert apart == "not installed: no_such_package (`make bench BENCH=peers` does)"
    assert ours == "\n"


def test_each_heat_has_publish_and_every_other_peer_is_in_one(tmp_path):
    program = """
import json
from peers.contest import PEERS, heats
print(json.dumps([heats(list(PEERS)), list(PEERS)]))
"""
    heats, names = json.loads(say(tmp_path, program))
    assert all(heat[0] == OURS for heat in heats)
    assert [name for heat in heats for name in heat[1:]] == [name for name in names if name != OURS]


def test_the_exit_status_says_whether_all_weights_were_right(tmp_path):
    files = []
    for trouble, others in (("WRONG: x", "have it"), ("", "WRONG: have [1]"), ("", "have it")):
        death = {"peer": OURS, "trouble": "", "seconds": 0.01, "raised": "", "others": others}
        files.append(earlier(tmp_path, cell(OURS, trouble=trouble), name=str(len(files)), **{OURS: death}))
    assert statuses(tmp_path, "peers.py", files) == [1, 1, 0]


def test_the_tables_are_pasted_between_their_marks_and_nothing_else_changes(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    before = {name: (tmp_path / name).read_text() for name in PAGES}
    blocked = {
        "peer": LOCK,
        "trouble": "",
        "seconds": None,
        "raised": "",
        "others": "still blocked after 10 s, when the benchmark ended it",
    }
    ours = [cell(OURS, p50=p50, beside=p50) for p50 in (1e-3, 9e-3, 2e-3)]  # of three heats
    found = earlier(tmp_path, *ours, cell(LOCK), **{LOCK: blocked})
    for _ in range(2):  # the second time replaces what the first has written
        done = run(BENCH / "peers.py", "--docs", "--root", tmp_path, "--from", found, cwd="/")
        assert done.returncode == 0, done.stderr
    lines = {
        PAGES[0]: [
            f"| {OURS} | 2 / 3 ms | 2 ms | 1.00 | 4 ms | 5 MB | 6 | 7 s |",
            f"| {LOCK} | 2 / 3 ms | 1 ms | 2.00 | 4 ms | 5 MB | 6 | 7 s |",
            "Not in this run: Ray, not installed: ray.",
        ],
        PAGES[1]: [
            f"| {OURS} | 1.00 | not measured |",
            f"| {LOCK} | 2.00 | still blocked after 10 s, when the benchmark ended it |",
        ],
    }
    for name in PAGES:
        check_paste((tmp_path / name).read_text(), before[name], "peers", [f"{line}\n" for line in lines[name]])


def test_the_chart_is_drawn_when_all_of_its_bars_were_measured(tmp_path):
    for folder in ("docs", "docs/plots"):
        (tmp_path / folder).mkdir()
    for name in PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    bars = json.loads(say(tmp_path, "import json; from peers import tables; print(json.dumps(tables.BARS))"))
    cells = [cell(bar, size="0.8 MB in 200 tensors", p50=1e-3 * place) for place, bar in enumerate(bars, 1)]
    drawing = tmp_path / "docs" / "plots" / "peers.svg"
    for measured, drawn in ((cells[1:], False), (cells, True)):
        done = run(BENCH / "peers.py", "--docs", "--root", tmp_path, "--from", earlier(tmp_path, *measured), cwd="/")
        assert done.returncode == 0, done.stderr
        assert drawing.exists() is drawn
    text = drawing.read_text()
    widths = [int(each) for each in re.findall(r'width="(\d+)" height="22"', text)]
    assert widths == [round(330 * place / len(bars)) for place in range(1, len(bars) + 1)]
    assert [text.index(bar) for bar in bars] == sorted(text.index(bar) for bar in bars)  # the shortest first
