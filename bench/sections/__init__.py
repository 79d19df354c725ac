"""The parts of the table that `make bench` prints, in its order: each a function of a clock, `rows` unless it is named.

A section yields a row as soon as it has it, so that what it had is not lost when it fails or is ended.
"""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    title: str
    module: str  # and, after a colon, the function
    seconds: float  # its share of a run of all
    needs: tuple[str, ...] = ()  # packages; without one there is no figure at all


SECTIONS = {
    "machine": Section("the machine itself", "sections.machine", 12),
    "calls": Section("single calls of the engine", "sections.calls", 14),
    "readers": Section("waking readers, and waiting for them", "sections.readers", 22),
    "learner": Section("a learner beside busy workers", "sections.learner", 18),
    "arenas": Section("one more arena", "sections.arenas", 14),
    "copy": Section("copies", "sections.copying", 40),
    "sources": Section("other sources, many leaves, parts of the weights", "sections.sources", 42),
    "lock": Section("beside share_memory() and a lock", "sections.lock", 16),
    "schemes": Section("a synchronous send of a scheme", "sends.section", 110),
    "deaths": Section("SIGKILL of a worker until send() raises", "sends.deaths", 18),
    "torchrl": Section("in TorchRL's collectors", "torchrl_scheme.section", 65, ("torchrl", "gymnasium")),
    "collectors": Section("MultiprocessCollector", "sections.collectors", 40, ("gymnasium",)),
    "environments": Section("MultiprocessCollector beside Gymnasium", "sections.environments", 45, ("gymnasium",)),
    "serving": Section("web servers", "serving.section", 60, ("uvicorn", "safetensors")),
    "demo": Section("the demo", "sections.demo", 12, ("gymnasium", "rich", "matplotlib")),
    "ray": Section("Ray", "remote.section:ray", 60, ("ray", "torchrl")),
    "rpc": Section("torch.distributed.rpc", "remote.section:rpc", 30, ("torchrl",)),
    "distributed": Section("torch.distributed", "remote.section:distributed", 30, ("torchrl",)),
    "growth": Section("growth", "sections.growth", 30, ("numpy",)),
}
