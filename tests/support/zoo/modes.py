"""The modes of the zoo: in what surroundings a bound module is used.

Each takes the world's bind, the worker's module and the use, binds, and returns what to call with x.
"""

from __future__ import annotations

import functools

import torch


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


MODES = {mode.__name__: mode for mode in (
    plain, read_section, compiled_whole_before, compiled_whole_after, compiled_in_place_after, called_by_compiled_code,
    called_by_compiled_code_in_a_section, autocast_loop, inference_mode,
)}  # fmt: skip

# Those whose results are not those of guarded calls, and may show the weights.
UNGUARDED = (read_section, called_by_compiled_code_in_a_section)
