"""Ctrl-C in a terminal reaches the trainer and its workers: the trainer decides what follows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from support.choice import first
from support.environments.basic import Constant, Counting, Policy
from support.faults.interrupts import alarms
from support.processes import segments, until

PROGRAM = """
import functools, sys, torch
from support.environments.basic import Constant, Slow
from shmsync.collectors import MultiprocessCollector
if __name__ == "__main__":
    place, sync, path = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
    env = functools.partial(Slow, step=0.01 if place == "next" else 0, close=1.0 if place == "close" else 0)
    frames = 20_000 if place == "next" else 40
    collector = MultiprocessCollector(env, Constant(), num_workers=2, frames_per_batch=frames, sync=sync)
    try:
        if place != "next":
            next(collector)
        print(*[member.process.pid for member in collector._pool.members.values()], flush=True)
        while place == "next":
            next(collector)
        while place == "update":
            collector.update_policy_weights_()
        while place == "both":
            next(collector)
            collector.update_policy_weights_()
        collector.shutdown()
    except KeyboardInterrupt:
        if place == "close":
            print("interrupted", flush=True)
            sys.exit()
        torch.save(collector.state_dict(), path)
    collector.load_state_dict(torch.load(path))
    if place != "next":
        next(collector)
        collector.update_policy_weights_()
    collector.shutdown()
    print("saved", flush=True)
"""


@pytest.mark.parametrize("place", first(["both", "next", "update", "close"]))
@pytest.mark.parametrize("sync", [True, False])
def test_ctrl_c_lets_the_trainer_save_its_state_and_leaves_nothing(tmp_path, place, sync):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trainer = subprocess.Popen(
        [sys.executable, str(program), place, str(sync), str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    until(lambda: busy(trainer, place))
    os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does
    out, err = trainer.communicate()
    assert out.strip() == ("interrupted" if place == "close" else "saved"), err
    assert "Traceback" not in err
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not segments(trainer.pid)


def busy(trainer, place):
    """Is it where the interrupt is meant to find it?"""
    times = psutil.Process(trainer.pid).cpu_times()
    if not hasattr(trainer, "began"):
        trainer.began = times.user, psutil.Process(trainer.pid).num_ctx_switches().voluntary
    if place in ("update", "both"):
        return psutil.Process(trainer.pid).num_ctx_switches().voluntary > trainer.began[1] + 20
    return psutil.Process(trainer.pid).status() == psutil.STATUS_SLEEPING


class Interrupt(BaseException):
    """As KeyboardInterrupt: tensordict turns an Exception in its constructors into its own."""


@pytest.mark.parametrize("sync", [True, False])
def test_an_interrupted_next_goes_on_where_it_was(collector, sync):
    batches = collector(Counting, Constant(), frames_per_batch=20, sync=sync)
    next(batches)
    chance = random.Random(0)
    steps = 10 if sync else 20
    batch = None

    def collect():
        nonlocal batch
        batch = next(batches)

    with alarms(Interrupt) as interrupted:
        whole = 0
        while whole < 150 or interrupted.landed < 150:
            if interrupted(collect, 4e-3, 1e-6):
                if chance.random() < 0.1:
                    state = batches.state_dict()
                    assert state["frames"] == batches.stats().frames
                continue
            whole += 1
            now, after = batch["observation"][..., 0], batch["next", "observation"][..., 0]
            assert now.shape == ((2, steps) if sync else (1, steps))
            assert torch.equal(after, now + 1)
            assert torch.equal(now[:, 1:], after[:, :-1] % 5)
            copy = batch.clone()
            assert (copy == batch)["observation"].all()
    assert whole >= 150


def test_an_interrupted_restart_is_done_again(collector):
    policy = Policy()
    batches = collector(policy=policy, restart_workers=True)
    next(batches)
    with alarms(Interrupt, seed=1) as interrupted:
        while interrupted.landed < 5:
            os.kill(batches._pool.members[1].process.pid, signal.SIGKILL)
            interrupted(lambda: next(batches), 0.2, 1e-3)
            next(batches)
            policy.set_tag(batches.stats().version + 1)
            batches.update_policy_weights_()
            batch = next(batches)
            assert torch.equal(batch["tag"].long(), batch["policy_version"])
