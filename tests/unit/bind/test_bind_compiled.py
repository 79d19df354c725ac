"""Bound modules that are compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from support.jobs.engine import run_source


@torch.no_grad()
def test_dynamo_compiles_the_forward_below_the_guard(bound):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    trainer, worker, _, _ = bound(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 2)
    torch._dynamo.reset()
    compiled = torch.compile(worker, backend=backend)
    x = torch.randn(3, 4)
    assert torch.allclose(compiled(x), trainer(x))
    assert frames, "Dynamo left the module eager"


BEFORE_DYNAMO = """
import sys, torch, shmsync

class Counting(shmsync.Publisher):
    calls = 0

    def publish(self, *args, **kwargs):
        self.calls += 1
        return super().publish(*args, **kwargs)

module, worker = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
with (
    shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub, Counting(module) as derived,
    torch.no_grad(),
):
    sub.bind(worker)
    assert "torch._dynamo" not in sys.modules

    @torch.compile(backend="eager")
    def step(x):
        module.weight.add_(1)
        pub.publish()
        return worker(x) + 1

    x = torch.ones(1, 2)
    for version in range(2, 6):
        torch.testing.assert_close(step(x), module(x) + 1)
        assert pub.version == version
    assert (derived.publish(), derived.publish(), derived.calls) == (2, 3, 2)
"""


def test_dynamo_may_be_imported_after_the_handles_were_made():
    done = subprocess.run([sys.executable, "-c", BEFORE_DYNAMO], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


WHOLE_GRAPH = """
import torch, shmsync
module, worker = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub, torch.no_grad():
    sub.bind(worker)
    compiled = torch.compile(worker, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), module(x))
        module.weight.add_(1)
        pub.publish()
"""


@pytest.mark.skipif(not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"), reason="torch breaks it once")
def test_the_first_call_of_a_guard_may_be_below_compiled_code_and_breaks_no_graph(start):
    start().call(run_source, WHOLE_GRAPH)
