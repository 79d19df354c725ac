"""A collector leaves nothing behind, also without a shutdown(); what it holds does not grow with the weights."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading

import pytest
import torch
from torchrl.collectors import MultiSyncCollector

import shmsync
from shmsync.integrations.torchrl import ShmWeightSyncScheme
from support.processes import alive, segments, until
from support.torchrl import children, environments, parts, policies, probes
from support.torchrl.environments import Steps
from support.torchrl.parts import ask
from support.torchrl.policies import Acting, Remembering, Tagged


@pytest.fixture
def start():
    """Collectors that only the test ends."""
    with parts.collectors(), parts.starting():  # the first only looks for processes that are left

        def make(policy, scheme):
            schemes = {"policy": scheme}
            options = {"frames_per_batch": 20, "total_frames": -1}
            return MultiSyncCollector([Steps] * 2, policy, weight_sync_schemes=schemes, **options)

        yield make


def held():
    """What this process holds."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "files": probes.open_files(),
        "segments": len(segments()),
        "children": len(parts.server.workers()),
    }


def use(collecting, policy):
    next(iter(collecting))
    policy.set(1)
    collecting.update_policy_weights_()
    collecting.update_policy_weights_(worker_ids=[0])


def the_collector_is_dropped(collecting, scheme):
    pass


def the_collector_is_shut_down(collecting, scheme):
    collecting.shutdown()


def both_are_shut_down_twice(collecting, scheme):
    collecting.shutdown()
    for _ in range(2):
        scheme.shutdown()
        collecting.shutdown()


def the_scheme_is_shut_down_first(collecting, scheme):
    scheme.shutdown()
    collecting.shutdown()


ENDS = [the_collector_is_dropped, the_collector_is_shut_down, both_are_shut_down_twice, the_scheme_is_shut_down_first]


@pytest.mark.parametrize("how", ENDS)
def test_round_after_round_nothing_is_left(start, how):
    after = []
    for _ in range(4):
        policy, scheme = Tagged(), ShmWeightSyncScheme()
        collecting = start(policy, scheme)
        use(collecting, policy)
        assert len(segments()) >= 1
        processes = collecting.procs
        how(collecting, scheme)
        del collecting, scheme, policy
        gc.collect()
        for process in processes:
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                process.join()
        del processes, process
        after.append(held())
    assert after[1] == after[2] == after[3], after
    assert after[-1]["segments"] == 0 and after[-1]["children"] == 0


def test_a_collector_that_cannot_be_made_leaves_nothing(start):
    scheme = ShmWeightSyncScheme()
    scheme.init_on_sender(model=Tagged(size=8), devices=["cpu", "cpu"], model_id="policy")
    with pytest.raises(shmsync.ManifestMismatch):
        start(Tagged(size=4), scheme)
    del scheme
    gc.collect()
    assert segments() == []


def test_a_scheme_that_was_only_initialised_or_only_connected_leaves_nothing():
    after = []
    for times in (2, 20):
        for connect in [False, True] * times:
            scheme = ShmWeightSyncScheme()
            scheme.init_on_sender(model=Tagged(), devices=["cpu"] * 4, model_id="policy")
            if connect:
                scheme.connect()
                assert len(segments()) == 1
            del scheme
        after.append(held())
    assert after[0] == after[1] and after[0]["segments"] == 0


def test_nothing_is_sent_after_the_shutdown(collector):
    collecting = collector(Tagged())
    scheme = collecting._weight_sync_schemes["policy"]
    scheme.shutdown()
    scheme.shutdown()
    assert segments() == []
    with pytest.raises(shmsync.ClosedError, match="shut down"):
        collecting.update_policy_weights_()
    assert parts.tags(collecting) == [0, 0]  # the workers go on with what they have
    assert policies.seen(next(iter(collecting))).unique().tolist() == [0]


def test_open_files_do_not_grow_with_the_number_of_tensors(collector):
    """With TorchRL's scheme 600 tensors are 650 open files."""
    here, workers, shared = [], [], []
    for layers in (2, 600):
        before = probes.open_files()
        collecting = collector(Tagged(layers=layers, size=3))
        collecting.update_policy_weights_(Tagged(1, layers=layers, size=3))
        workers.append(ask(collecting, "env.call", probes.open_files))
        here.append(probes.open_files() - before)
        shared.append(len(segments()))
        assert parts.tags(collecting) == [1, 1]  # last: torch opens a file for each tensor of an answer
    assert workers[1] == workers[0] and here[1] <= here[0]
    assert shared == [1, 2]  # one for each collector


def test_many_updates_hold_no_more_than_a_few(collector):
    policy = Acting(Remembering())
    collecting = collector(policy)

    def updates(count):
        for number in range(count):
            policy.module.write("z" * 5000 * (number % 3))
            collecting.update_policy_weights_(worker_ids=[None, [0], [1]][number % 3])
        gc.collect()
        files = ask(collecting, "env.call", probes.open_files)
        return *files, probes.open_files(), threading.active_count(), len(segments())

    updates(30)
    after = updates(30)
    assert updates(60) == after and after[-1] <= 3


def test_workers_have_one_thread_more_for_any_number_of_models(collector):
    critic = parts.scheme_of(environments.Critic(), "env.critic")
    one = collector(Tagged())
    two = collector(Tagged(), schemes={"policy": ShmWeightSyncScheme(), "env.critic": critic})
    names = [ask(each, "env.call", probes.thread_names) for each in (one, two)]
    assert names[0] == names[1]
    assert all(each.count("shmsync") == 1 for each in names[0] + names[1])
    assert "shmsync" not in probes.thread_names()  # none in the trainer


def program(say, finish):
    """A trainer that does not end its collector."""
    torch.set_num_threads(1)
    with parts.starting():
        policy = Tagged(size=1 << 20)
        collecting = MultiSyncCollector(
            [Steps] * 2, policy, weight_sync_schemes={"policy": ShmWeightSyncScheme()}, frames_per_batch=20
        )
        next(iter(collecting))
        collecting.update_policy_weights_()
        say(parts.pids(collecting))
        if finish == "wait":
            threading.Event().wait()


@pytest.mark.parametrize("finish", ["return", "wait"])
def test_what_a_trainer_leaves_that_just_ends_or_is_killed(finish):
    """The weights go with the last process that maps them; a killed trainer leaves its small control segment."""
    with parts.collectors(), children.child(program, finish) as trainer:
        workers = trainer.hear()
        assert len(workers) == 2
        if finish == "wait":
            trainer.process.kill()
        trainer.process.join()
        until(lambda: not any(alive(pid) for pid in workers))
        left = segments(trainer.process.pid)
        assert trainer.process.exitcode == (0 if finish == "return" else -signal.SIGKILL)
        assert len(left) <= (0 if finish == "return" else 1)
        with contextlib.suppress(FileNotFoundError):  # the next publisher removes it, perhaps another test's just now
            assert sum(path.stat().st_blocks * 512 for path in left) < 1 << 20
