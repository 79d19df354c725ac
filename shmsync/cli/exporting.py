"""`shmsync export NAME FILE`: the weights of a live arena as a safetensors file.

This command alone needs torch, and imports it when it runs: the others must start in a moment.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..memory.inspection import ties
from ..memory.manifest import Manifest, contiguous
from ..memory.slab import refuse_too_large
from .inspecting import find
from .output import Commands, command, seconds, size

if TYPE_CHECKING:
    import torch

_EXAMPLES = """
shmsync export policy policy.safetensors
shmsync export policy policy.safetensors --force        in the place of an older one
python -c "from safetensors.torch import load_model; load_model(Policy(), 'policy.safetensors')"
"""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(
        commands, "export", "write a consistent checkpoint of a live arena (needs shmsync[safetensors])", _EXAMPLES
    )
    made.add_argument("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    made.add_argument("file", metavar="FILE", help="the safetensors file to make")
    made.add_argument("--force", action="store_true", help="replace the file if there is one")
    made.add_argument(
        "--timeout",
        type=seconds(most=math.inf),
        default=10.0,
        metavar="S",
        help="wait so long for the weights to be readable (10); inf: without limit",
    )
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from safetensors import SafetensorError
    from safetensors.torch import save

    from ..engine.subscriber import Subscriber, reader_of

    path = Path(arguments.file)
    if (problem := _problem(path, arguments.force)) is not None:
        print(f"shmsync export: {problem}", file=sys.stderr)
        return 1
    find(arguments.name, 0)  # a name that there is not is no name to wait for
    with Subscriber(arguments.name, consistency="optimistic", timeout=arguments.timeout) as sub:
        manifest = reader_of(sub).arena.manifest
        _check_room(arguments.name, manifest)
        weights, version = sub.snapshot()
    tensors = {key if isinstance(key, str) else ".".join(key): tensor for key, tensor in weights.items(True, True)}
    kept, names = _once(tensors, manifest)
    about = {"format": "pt", "shmsync.arena": arguments.name, "shmsync.version": str(version)}
    try:
        _put(path, save(kept, metadata=about | names), arguments.force)
    except FileExistsError:
        print(f"shmsync export: {_there(path)}", file=sys.stderr)
        return 1
    except (KeyError, ValueError, SafetensorError) as error:
        print(f"shmsync export: safetensors cannot hold these weights: {error}; nothing was written", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"shmsync export: {path} cannot be written: {error.strerror}; nothing was left there", file=sys.stderr)
        return 1
    count = sum(tensor.nbytes for tensor in kept.values())
    print(f"{path}: version {version} of {arguments.name}, {len(kept)} tensors, {size(count)}")
    return 0


def _problem(path: Path, force: bool) -> str | None:
    """Why this file cannot be made, found out before anything is copied."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it first"
    return _there(path) if not force and os.path.lexists(path) else None


def _there(path: Path) -> str:
    return f"{path} exists; --force replaces it"


def _check_room(name: str, manifest: Manifest) -> None:
    """A snapshot and its file in memory are two copies, three of leaves that are not contiguous.

    A process that takes more than there is, is killed.
    """
    permuted = sum(leaf.nbytes for leaf in manifest.leaves if leaf.strides != contiguous(leaf.shape))
    what = f"the copies that make a checkpoint of arena {name!r}"
    refuse_too_large(2 * manifest.used_bytes + permuted, what, "free some")


def _once(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tied tensors under one name; and for the metadata, which name stands for each other, as save_model() does.

    They are contiguous: a file has no other layout.
    """
    names = {other: min(group) for group in ties(manifest).values() for other in group if other != min(group)}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if name not in names}, names


def _put(path: Path, content: bytes, force: bool) -> None:
    """The whole file or none, under its name; a half of it is never seen."""
    made = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with open(made, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not force:
            try:
                os.link(made, path)  # refuses where there is one by now
                return
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise
                if os.path.lexists(path):  # a file system without links
                    raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
        os.replace(made, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(made)
