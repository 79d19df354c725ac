"""The modes of the zoo: in what surroundings a bound module is used.

Each takes the world's bind, the worker's module and the use, binds, and returns what to call with x.
"""

from __future__ import annotations

import copy
import functools

import torch

from support.calls import Call


def plain(bind, module, use):
    worker = bind(module)
    return lambda x: use.run(worker, x)


def read_section(bind, module, use):
    worker = bind(module, guard=False)

    def run(x):
        with bind.subscriber.read():
            return use.run(worker, x)

    return run


def compiled_whole_before(bind, module, use):
    worker = bind(torch.compile(module, backend="eager", fullgraph=use.whole))
    return lambda x: use.run(worker, x)


def compiled_whole_after(bind, module, use):
    worker = torch.compile(bind(module), backend="eager", fullgraph=use.whole)
    return lambda x: use.run(worker, x)


def compiled_in_place_after(bind, module, use):
    worker = bind(module)
    worker.compile(backend="eager")
    return lambda x: use.run(worker, x)


def called_by_compiled_code(bind, module, use):
    worker = bind(module)
    return torch.compile(lambda x: use.run(worker, x), backend="eager")


def called_by_compiled_code_in_a_section(bind, module, use):
    worker = bind(module, guard=False)
    run = torch.compile(lambda x: use.run(worker, x), backend="eager", fullgraph=use.whole)

    def section(x):
        with bind.subscriber.read():
            return run(x)

    return section


def autocast_loop(bind, module, use):
    worker = bind(module)

    def run(x):
        return use.run(worker, x)

    run.around = torch.autocast("cpu", dtype=torch.bfloat16)  # one for all calls
    run.expected_around = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    return run


def inference_mode(bind, module, use):
    with torch.inference_mode():
        worker = bind(module)

    def run(x):
        with torch.inference_mode():
            return use.run(worker, x)

    return run


def several_threads(bind, module, use):
    worker = bind(module)

    def call(x):
        return use.run(worker, x), bind.subscriber.version

    def run(x):
        first = call(x)
        bind.advance()
        return [first, Call(call, x).result(), call(x)]

    run.labelled = True  # it says itself which version each result is of
    return run


def copied(bind, module, use):
    """A copy computes as the version does of which it was made, whatever is published later."""
    worker = bind(module)

    def run(x):
        out = use.run(worker, x)
        version = bind.subscriber.version
        twin = copy.deepcopy(worker)
        of_twin = bind.subscriber.version  # copying is a section of this thread
        bind.advance()
        return [(out, version), (use.run(twin, x), of_twin)]

    run.labelled = True
    return run


MODES = {mode.__name__: mode for mode in (
    plain, read_section, compiled_whole_before, compiled_whole_after, compiled_in_place_after, called_by_compiled_code,
    called_by_compiled_code_in_a_section, autocast_loop, inference_mode, several_threads, copied,
)}  # fmt: skip

# Those whose results are not those of guarded calls, and may show the weights.
UNGUARDED = (read_section, called_by_compiled_code_in_a_section)
