"""Ctrl-C in a terminal reaches the trainer and its workers: the trainer decides what follows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from support.processes import segments, until

PROGRAM = """
import functools, sys, torch
from support.environments.basic import Constant, Slow
from shmsync.collectors import MultiprocessCollector
if __name__ == "__main__":
    env = functools.partial(Slow, step=0.003)
    collector = MultiprocessCollector(env, Constant(), num_workers=2, frames_per_batch=400, sync=sys.argv[1] == "True")
    try:
        print(*[member.process.pid for member in collector._members.values()], flush=True)
        while True:
            next(collector)
    except KeyboardInterrupt:
        torch.save(collector.state_dict(), sys.argv[2])
    collector.load_state_dict(torch.load(sys.argv[2]))
    batch = next(collector)
    assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
    collector.shutdown()
    print("saved", flush=True)
"""


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_after_a_ctrl_c_the_state_can_be_saved_and_the_next_batch_is_whole(tmp_path, sync):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trainer = subprocess.Popen(
        [sys.executable, str(program), str(sync), str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    until(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_SLEEPING)  # it waits for a batch
    os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does
    out, err = trainer.communicate()
    assert out.strip() == "saved", err
    assert "Traceback" not in err
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not segments(trainer.pid)
