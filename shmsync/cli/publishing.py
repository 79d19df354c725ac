"""`shmsync publish NAME FILE`: an arena with the weights of a file, for processes that no trainer feeds."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..engine.publisher import Publisher, writer_of
from ..errors import ReaderStalled
from .output import Refused, say, size

_ENDING = {signal.SIGTERM, signal.SIGINT}
_BETWEEN_LOOKS = 0.5  # seconds
_INDEX = ".safetensors.index.json"  # of shards in the same folder, as Hugging Face writes large models
Stamp = list[tuple[int, ...]] | None  # of files: others may have other contents. None: one of them is not there


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    path = Path(arguments.file)
    # They end the waits below and nothing else, so none of them ends the process between two steps.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        loaded = _stamp(path)
        try:
            weights = load(path)
            pub = Publisher(weights, name=arguments.name, slots=2)  # so that no reader waits for a newer file
        except (Refused, ValueError, TypeError) as error:  # a ManifestMismatch is a ValueError
            raise Refused(f"{path}: {error}; nothing was published") from error
        with pub:
            names = set(_names(weights))
            del weights
            writer_of(pub).forget_source()  # else a copy of the weights stays in this process
            _log_version(pub, path)
            if arguments.watch:
                _watch(pub, path, names, loaded)
            else:
                signal.sigwait(_ENDING)
            _log(f"arena {pub.name} ends at version {pub.version}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _watch(pub: Publisher, path: Path, names: set[str], loaded: Stamp) -> None:
    """Publish the weights of these names whenever the file is another one; until a signal ends it."""
    seen = loaded
    while signal.sigtimedwait(_ENDING, _BETWEEN_LOOKS) is None:
        before, seen = seen, _stamp(path)
        if seen == loaded or (seen is not None and seen != before):  # it is published, or may still be written to
            continue
        if seen is None:
            _log(f"{path} is gone; version {pub.version} stays")
            loaded = None
            continue
        try:
            if _publish(pub, path, names, seen):
                loaded = seen
        except ReaderStalled as error:  # it is tried again
            _log(f"{path} is not published yet, and version {pub.version} stays: {error}")
        except Exception as error:  # nothing that a file holds ends the process while others use its arena
            loaded = seen
            _log(f"{path} is refused, and version {pub.version} stays: {str(error) or type(error).__name__}")


def _publish(pub: Publisher, path: Path, names: set[str], seen: Stamp) -> bool:
    """Publish what the file holds; False if it changed meanwhile. The weights go when this returns."""
    weights = load(path)
    if _stamp(path) != seen:
        return False
    lacking = names - set(_names(weights))  # publish() would take the others, and leave these as they are
    if lacking:
        raise Refused(f"it lacks {', '.join(sorted(lacking)[:5])}, {len(lacking)} of {len(names)} tensors")
    pub.publish(weights)
    _log_version(pub, path)
    return True


def _stamp(path: Path) -> Stamp:
    try:
        found = [os.stat(file) for file in (path, *_shards(path))]
    except (OSError, Refused):
        return None
    return [(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in found]


def _shards(path: Path) -> dict[Path, list[str]]:
    """Of an index, the other files and which tensors it wants of each."""
    found: dict[Path, list[str]] = {}
    if path.name.endswith(_INDEX):
        for name, shard in _parsed(lambda data: json.loads(data)["weight_map"], path).items():
            found.setdefault(path.with_name(Path(shard).name), []).append(name)
    return found


def load(path: Path) -> Mapping[str, Any]:
    """The weights in a file, or in the shards of an index, by name; tied ones under each of their names.

    Raises Refused, ModuleNotFoundError.
    """
    weights: dict[str, Any] = {}
    if shards := _shards(path):
        for shard, wanted in shards.items():
            found = _tensors(shard)
            if lacking := [name for name in wanted if name not in found]:
                raise Refused(f"{shard.name} lacks {', '.join(lacking[:5])}")
            weights |= found
    else:
        weights = _tensors(path)
    # A safetensors file is read in a random order, and a subscriber follows an arena of the same layout only.
    return dict(sorted(weights.items(), key=lambda item: str(item[0])))


def _tensors(path: Path) -> dict[str, Any]:
    weights = _parsed(_safetensors if path.suffix == ".safetensors" else _torch_file, path)
    if not isinstance(weights, Mapping):
        raise Refused(f"it holds a {type(weights).__name__}; save the state_dict() of the module")
    return dict(weights)


def _parsed(read: Any, path: Path) -> Any:
    """What `read` makes of the bytes of a file.

    The file is read, not mapped: a process that maps it would end with a SIGBUS if it became shorter meanwhile.
    """
    try:
        data = path.read_bytes()
    except (OSError, MemoryError) as error:
        raise Refused(getattr(error, "strerror", None) or "there is not enough memory to read it") from error
    try:
        return read(data)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the parsers raise many kinds
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Refused(f"it cannot be read, so it may not be whole: {first}") from error


def _safetensors(data: bytes) -> Mapping[str, Any]:
    from safetensors.torch import load as read

    tensors = read(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for other, kept in header.get("__metadata__", {}).items():  # as save_model() and `shmsync export` note tied ones
        if kept in tensors and other not in tensors:
            tensors[other] = tensors[kept]
    return tensors


def _torch_file(data: bytes) -> Any:
    if data[8:9] == b"{":  # a safetensors file of another name: no file of torch.save() has JSON there
        return _safetensors(data)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _names(weights: Mapping[str, Any]) -> Iterator[str]:
    for key, value in weights.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name in _names(value))
        else:
            yield str(key)


def _log_version(pub: Publisher, path: Path) -> None:
    tensors = list(pub.weights.values(True, True))
    what = f"{len(tensors)} tensors, {size(sum(tensor.nbytes for tensor in tensors))}"
    _log(f"version {pub.version} of {pub.name}: {path}, {what}")


def _log(text: str) -> None:
    """Write a line, also for an error of several lines. A standard output that is full or gone ends nothing."""
    with suppress(OSError):
        say(" ".join(text.split()))
        sys.stdout.flush()
