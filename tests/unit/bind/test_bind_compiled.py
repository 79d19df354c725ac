"""Bound modules that are compiled."""

from __future__ import annotations

import subprocess
import sys

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
    unbroken = hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")  # without it torch breaks the graph once
    whole = torch.compile(worker, backend="eager", fullgraph=unbroken)  # the guard's first call is below compiled code

    @torch.compile(backend="eager")
    def step(x):
        module.weight.add_(1)
        pub.publish()
        return worker(x) + 1

    x = torch.ones(1, 2)
    for version in range(2, 6):
        torch.testing.assert_close(whole(x), module(x))
        torch.testing.assert_close(step(x), module(x) + 1)
        assert pub.version == version
    assert (derived.publish(), derived.publish(), derived.calls) == (2, 3, 2)
"""


def test_dynamo_may_be_imported_after_the_handles_were_made_and_compiles_whole_graphs():
    done = subprocess.run([sys.executable, "-c", BEFORE_DYNAMO], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
