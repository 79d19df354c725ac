"""The modes of the zoo: in what surroundings a bound module is used.

Each takes the world's bind, the worker's module and the use, binds, and returns what to call with x.
"""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext

import torch

from support.calls import Call
from support.zoo.kinds import WIDTH

# In what surroundings the worker's module is made.
CREATIONS = {"plain": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
             "default device": functools.partial(torch.device, "cpu")}  # fmt: skip


def plain(bind, module, use):
    worker = bind(module)
    return lambda x: use.run(worker, x)


def named(bind, module, use):
    worker = bind(module, guard=use.names)
    return lambda x: use.run(worker, x)


def read_section(bind, module, use):
    worker = bind(module, guard=False)

    def run(x):
        with bind.subscriber.read():
            return use.run(worker, x)

    return run


def used_then_compiled_before(bind, module, use):
    compiled = torch.compile(module, backend="eager")
    # A module of inference tensors that counts its calls needs inference mode: torch refuses the count outside it.
    inference = any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))
    with torch.no_grad(), torch.inference_mode(inference):
        use.run(compiled, torch.zeros(2, WIDTH))
    worker = bind(compiled)
    return lambda x: use.run(worker, x)


def compiled_whole_before(bind, module, use):
    worker = bind(torch.compile(module, backend="eager", fullgraph=use.whole))
    return lambda x: use.run(worker, x)


def compiled_whole_after(bind, module, use):
    worker = torch.compile(bind(module), backend="eager", fullgraph=use.whole)
    return lambda x: use.run(worker, x)


def compiled_in_place_before(bind, module, use):
    module.compile(backend="eager")
    worker = bind(module)
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


def section_in_compiled_code(bind, module, use):
    worker = bind(module, guard=False)

    @torch.compile(backend="eager")
    def run(x):
        with bind.subscriber.read():
            return use.run(worker, x)

    return run


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
        out = use.run(worker, x)
        bind.advance()
        other = Call(call, x).result()
        return [(out, bind.subscriber.version), other, call(x)]

    run.labelled = True  # it says itself which version each result is of
    return run


def copied(bind, module, use):
    return _of_copies(bind, module, use, copy.deepcopy)


def pickled(bind, module, use):
    return _of_copies(bind, module, use, lambda worker: pickle.loads(pickle.dumps(worker)))


def _of_copies(bind, module, use, made):
    """A copy computes as the version does of which it was made, whatever is published later."""
    used = use.make()
    use.run(used, torch.zeros(2, WIDTH))
    try:
        made(used)
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError):
        return plain(bind, module, use)  # torch copies no module with a computed weight, and pickles none with lambdas
    worker = bind(module)

    def run(x):
        out = use.run(worker, x)
        version = bind.subscriber.version
        twin = made(worker)
        of_twin = bind.subscriber.version  # copying is a section of this thread
        bind.advance()
        return [(out, version), (use.run(twin, x), of_twin)]

    run.labelled = True
    return run


def two_arenas(bind, module, use):
    worker = bind.in_parts(module)
    return lambda x: use.run(worker, x)


MODES = {mode.__name__: mode for mode in (
    plain, named, read_section, used_then_compiled_before, compiled_whole_before, compiled_whole_after,
    compiled_in_place_before, compiled_in_place_after, called_by_compiled_code, called_by_compiled_code_in_a_section,
    section_in_compiled_code, autocast_loop, inference_mode, several_threads, copied, pickled, two_arenas,
)}  # fmt: skip

# Those whose results are not those of guarded calls, and may show the weights.
UNGUARDED = (read_section, called_by_compiled_code_in_a_section, section_in_compiled_code)
