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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ManifestMismatch, ShmSyncError
from .output import Commands, Page, command, seconds, size

if TYPE_CHECKING:
    from ..engine.publisher import Publisher

_EXAMPLES = """
shmsync publish policy policy.safetensors                until SIGTERM or Ctrl-C
shmsync publish policy policy.safetensors --watch        a new version each time the file is replaced
shmsync publish policy policy.pt --watch --slots 3       a state_dict() that torch.save() has written
"""
_ENDING = {signal.SIGTERM, signal.SIGINT}
Stamp = tuple[int, ...] | None  # of a file: with other values it may have another content. None: there is no file


class Unusable(Exception):
    """Why these weights cannot be read from the file."""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "publish", "publish the weights of a file, and each newer file of that name", _EXAMPLES)
    made.add_argument("name", metavar="NAME", help="the arena's name; subscribers attach by it")
    made.add_argument("file", metavar="FILE", help="a safetensors file, or a state_dict() in a file of torch.save()")
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
    from ..engine.publisher import Publisher, writer_of

    path = Path(arguments.file)
    # They end the waits below and nothing else, so none of them ends the process between two steps.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        loaded = _stamp(path)
        weights = load(path)
        if signal.sigpending() & _ENDING:
            return 0
        pub = Publisher(weights, name=arguments.name, slots=arguments.slots)
    except (Unusable, ValueError, TypeError) as error:  # a ManifestMismatch is a ValueError
        print(f"shmsync publish: {path}: {error}; nothing was published", file=sys.stderr)
        return 1
    with pub:
        names = set(_names(weights))
        del weights
        writer_of(pub).forget_source()  # else a copy of the weights stays in this process
        _say_published(pub, path)
        if arguments.watch:
            _watch(pub, path, names, loaded, arguments.interval)
        else:
            signal.sigwait(_ENDING)
        _say(f"arena {pub.name} ends at version {pub.version}")
    return 0


def _watch(pub: Publisher, path: Path, names: set[str], loaded: Stamp, interval: float) -> None:
    """Publish the weights of these names whenever the file is another one; until a signal ends it."""
    seen, said = loaded, loaded
    while signal.sigtimedwait(_ENDING, interval) is None:
        before, seen = seen, _stamp(path)
        if seen == loaded:
            continue
        if seen is None:
            _say(f"{path} is gone; version {pub.version} stays")
            loaded = said = None
        elif seen == before:  # else it may still be written to
            try:
                if not _publish_again(pub, path, names, seen):
                    continue
            except Exception as error:  # nothing that a file holds ends the process while others use its arena
                # As of a reader that stays in its section: it is tried again.
                again = isinstance(error, ShmSyncError) and not isinstance(error, ManifestMismatch)
                if not again or seen != said:
                    what, why = "not published yet" if again else "refused", str(error) or type(error).__name__
                    _say(f"{path} is {what}, and version {pub.version} stays: {why}")
                said = seen
                if again:
                    continue
            loaded = said = seen


def _publish_again(pub: Publisher, path: Path, names: set[str], seen: Stamp) -> bool:
    """Publish what the file holds; False if it changed meanwhile. The weights go when this returns."""
    weights = load(path)
    if _stamp(path) != seen:
        return False
    lacking = names - set(_names(weights))  # publish() would take the others, and leave these as they are
    if lacking:
        raise Unusable(f"it lacks {', '.join(sorted(lacking)[:5])}, {len(lacking)} of {len(names)} tensors")
    pub.publish(weights)
    _say_published(pub, path)
    return True


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def load(path: Path) -> Mapping[str, Any]:
    """The weights in a file, by name; tied ones under each of their names. Raises Unusable, ModuleNotFoundError.

    The file is read, not mapped: a process that maps it would end with a SIGBUS if it became shorter meanwhile.
    """
    if path.exists() and not path.is_file():
        raise Unusable("it is no regular file")
    try:
        data = path.read_bytes()
    except (OSError, MemoryError) as error:
        raise Unusable(getattr(error, "strerror", None) or "there is not enough memory to read it") from error
    # After 8 bytes a safetensors file has JSON, which neither format of torch.save() has there.
    read = _safetensors if path.suffix == ".safetensors" or data[8:9] == b"{" else _torch_file
    try:
        weights = read(data)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the parsers raise many kinds
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


def _say_published(pub: Publisher, path: Path) -> None:
    tensors = list(pub.weights.values(True, True))
    what = f"{len(tensors)} tensors, {size(sum(tensor.nbytes for tensor in tensors))}"
    _say(f"version {pub.version} of {pub.name}: {path}, {what}")


def _say(text: str) -> None:
    """Write a line of the log, also for an error of several lines. A log that is full or gone ends nothing."""
    with suppress(OSError):
        Page().line(" ".join(text.split()))
        sys.stdout.flush()
