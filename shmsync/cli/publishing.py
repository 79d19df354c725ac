"""`shmsync publish NAME FILE`: an arena with the weights of a file, for processes that no trainer feeds."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..engine.publisher import Publisher, writer_of
from .output import Refused, say, size

_ENDING = {signal.SIGTERM, signal.SIGINT}
_INDEX = ".safetensors.index.json"  # of shards in the same folder, as Hugging Face writes large models


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    path = Path(arguments.file)
    # They end the wait below and nothing else, so none of them ends the process between two steps.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        try:
            pub = Publisher(load(path), name=arguments.name)
        except (Refused, ValueError, TypeError) as error:  # a ManifestMismatch is a ValueError
            raise Refused(f"{error}; nothing was published") from error
        with pub:
            writer_of(pub).source = None  # else a copy of the weights stays in this process
            tensors = list(pub.weights.values(True, True))
            what = f"{len(tensors)} tensors, {size(sum(tensor.nbytes for tensor in tensors))}"
            _log(f"version {pub.version} of {pub.name}: {path}, {what}")
            signal.sigwait(_ENDING)
            _log(f"arena {pub.name} ends")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def load(path: Path) -> Mapping[str, Any]:
    """The weights in a file, or in the shards of an index, by name; tied ones under each of their names.

    Raises Refused for what cannot be read, or lacks what its index says; ModuleNotFoundError.
    """
    if path.name.endswith(_INDEX):
        weights: dict[str, Any] = {}
        wanted: dict[str, list[str]] = {}
        for name, shard in _read(path, lambda: json.loads(path.read_text())["weight_map"]).items():
            wanted.setdefault(shard, []).append(name)
        for shard, names in wanted.items():
            found = _tensors(path.with_name(shard))
            if lacking := [name for name in names if name not in found]:
                raise Refused(f"{path.with_name(shard)} lacks {', '.join(lacking[:5])}")
            weights |= found
    else:
        weights = _tensors(path)
    # A safetensors file is read in a random order, and a subscriber follows an arena of the same layout only.
    return dict(sorted(weights.items(), key=lambda item: str(item[0])))


def _tensors(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return dict(_read(path, lambda: _safetensors(path)))
    weights = _read(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
    if not isinstance(weights, Mapping):
        raise Refused(f"{path} holds a {type(weights).__name__}; save the state_dict() of the module")
    return dict(weights)


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        for other, kept in (file.metadata() or {}).items():  # as save_model() and `shmsync export` note tied ones
            if kept in tensors and other not in tensors:
                tensors[other] = tensors[kept]
    return tensors


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ModuleNotFoundError:
        raise
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # the parsers raise many kinds
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Refused(f"{path} cannot be read, so it may not be whole: {first}") from error


def _log(text: str) -> None:
    """Write a line. A standard output that is full or gone ends nothing."""
    with suppress(OSError):
        say(text)
        sys.stdout.flush()
