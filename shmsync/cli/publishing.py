"""`shmsync publish NAME FILE`: an arena with the weights of a file, for processes that no trainer feeds.

As `export` this command needs torch, and imports it when it runs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ManifestMismatch, ShmSyncError
from .output import Commands, command, seconds, size

if TYPE_CHECKING:
    from ..engine.publisher import Publisher

_EXAMPLES = """
shmsync publish policy policy.safetensors                until SIGTERM or Ctrl-C
shmsync publish policy policy.safetensors --watch        a new version each time the file is replaced
shmsync publish policy policy.pt --watch --slots 3       a state_dict() that torch.save() has written
"""
_ENDING = {signal.SIGTERM, signal.SIGINT}
Stamp = tuple[int, int, int] | None  # of a file: other values, another content. None: there is no file


class Unusable(Exception):
    """Why these weights cannot be read from the file."""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "publish", "publish the weights of a file, and each newer file of that name", _EXAMPLES)
    made.add_argument("name", metavar="NAME", help="the arena's name; subscribers attach by it")
    made.add_argument("file", metavar="FILE", help="a .safetensors file, or a state_dict() in a file of torch.save()")
    made.add_argument("--watch", action="store_true", help="publish again when the file is replaced")
    made.add_argument(
        "--slots", type=int, default=2, metavar="N", help="versions that have room; with 2 no reader waits (2)"
    )
    made.add_argument(
        "--interval",
        type=seconds(least=0.01),
        default=0.5,
        metavar="S",
        help="time between two looks at the file; it is read when two looks find it the same (0.5)",
    )
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    # These signals end the waits of _look_again() alone, so none of them ends the process between two steps.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        from ..engine.publisher import Publisher

        stamp = _stamp(path)
        weights = load(path)
        pub = Publisher(weights, name=arguments.name, slots=arguments.slots)
    except ModuleNotFoundError as error:
        print(f"publish needs {error.name}: pip install 'shmsync[safetensors]'", file=sys.stderr)
        return 2
    except (Unusable, ValueError) as error:  # also a ManifestMismatch
        print(f"shmsync publish: {path}: {error}; nothing was published", file=sys.stderr)
        return 1
    with pub:
        _say(f"version {pub.version} of {pub.name}: {path}, {_what(pub)}")
        names = set(_names(weights))
        del weights
        if arguments.watch:
            _watch(pub, path, names, stamp, arguments.interval)
        else:
            signal.sigwait(_ENDING)
        _say(f"arena {pub.name} ends at version {pub.version}")
    return 0


def _watch(pub: Publisher, path: Path, names: set[str], loaded: Stamp, interval: float) -> None:
    """Publish the weights of these names whenever the file is another one; until a signal ends it."""
    seen = loaded
    while signal.sigtimedwait(_ENDING, interval) is None:
        before, seen = seen, _stamp(path)
        if seen == loaded:
            continue
        if seen is None:
            _say(f"{path} is gone; version {pub.version} stays")
            loaded = None
            continue
        if seen != before:  # it may still be written to
            continue
        try:
            weights = load(path)
            if _stamp(path) != seen:
                continue
            lacking = names - set(_names(weights))  # publish() would take the others and leave these as they are
            if lacking:
                raise Unusable(f"it lacks {', '.join(sorted(lacking)[:5])}, {len(lacking)} of {len(names)} tensors")
            pub.publish(weights)
        except (Unusable, ManifestMismatch) as error:
            _say(f"{path} is refused, and version {pub.version} stays: {error}")
        except ShmSyncError as error:  # as a reader that stays in its section
            _say(f"{path} is not published yet, and version {pub.version} stays: {error}")
            continue
        else:
            _say(f"version {pub.version} of {pub.name}: {path}, {_what(pub)}")
        loaded = seen


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def load(path: Path) -> Mapping[str, Any]:
    """The weights in a file, by name; tied ones under each of their names. Raises Unusable, ModuleNotFoundError.

    The file is read, not mapped: a process that maps it would end with a SIGBUS if it became shorter meanwhile.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(error.strerror or str(error)) from error
    read = _safetensors if path.suffix == ".safetensors" else _torch_file
    try:
        weights = read(data)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the parsers raise many kinds, and none may end the process while others use its arena
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unusable(f"it cannot be read, so it may not be whole: {first}") from error
    if not isinstance(weights, Mapping):
        raise Unusable(f"it holds a {type(weights).__name__}; save the state_dict() of the module")
    # A safetensors file is read in a random order, and a subscriber follows an arena of the same layout only.
    return dict(sorted(weights.items(), key=lambda item: str(item[0])))


def _safetensors(data: bytes) -> Mapping[str, Any]:
    from safetensors.torch import load as read

    tensors = read(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for other, kept in header.get("__metadata__", {}).items():  # as save_model() and `shmsync export` note tied ones
        if kept in tensors and other not in tensors:
            tensors[other] = tensors[kept]
    return tensors


def _torch_file(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _names(weights: Mapping[str, Any]) -> Iterator[str]:
    for key, value in weights.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name in _names(value))
        else:
            yield str(key)


def _what(pub: Publisher) -> str:
    tensors = list(pub.weights.values(True, True))
    return f"{len(tensors)} tensors, {size(sum(tensor.nbytes for tensor in tensors))}"


def _say(text: str) -> None:
    print(" ".join(text.split()), flush=True)  # a line of the log each, also for an error of several lines
