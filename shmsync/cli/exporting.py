"""`shmsync export NAME FILE`: the weights of a live arena as a safetensors file."""

from __future__ import annotations

import argparse
import os
import secrets
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save

from ..engine.subscriber import Subscriber, reader_of
from ..memory.inspection import ties
from ..memory.manifest import contiguous
from ..memory.slab import refuse_too_large
from .listing import look
from .output import Refused, size


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    name, path = arguments.name, Path(arguments.file)
    # What can be found out about the file before anything is copied.
    if path.is_dir():
        raise Refused(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise Refused(f"there is no folder {path.parent}; make it first")
    if not arguments.force and os.path.lexists(path):
        raise Refused(f"{path} exists; --force replaces it")
    look(name)  # a name that there is not is no name to wait for
    with Subscriber(name, consistency="optimistic", timeout=arguments.timeout) as sub:
        manifest = reader_of(sub).arena.manifest
        # A snapshot and its file in memory are two copies, three of leaves that are not contiguous. A process that
        # takes more than there is, is killed.
        permuted = sum(leaf.nbytes for leaf in manifest.leaves if leaf.strides != contiguous(leaf.shape))
        what = f"the copies that make a checkpoint of arena {name!r}"
        refuse_too_large(2 * manifest.used_bytes + permuted, what, "free some")
        weights, version = sub.snapshot()
    # Tied tensors are written once; the metadata says which name stands for each other, as save_model() does.
    tied = {other: min(group) for group in ties(manifest).values() for other in group if other != min(group)}
    tensors = {key if isinstance(key, str) else ".".join(key): tensor for key, tensor in weights.items(True, True)}
    kept = {key: tensor.contiguous() for key, tensor in tensors.items() if key not in tied}
    about = {"format": "pt", "shmsync.arena": name, "shmsync.version": str(version)}
    try:
        content = save(kept, metadata=about | tied)
    except (KeyError, ValueError, SafetensorError) as error:
        raise Refused(f"safetensors cannot hold these weights: {error}; nothing was written") from error
    _put(path, content)
    total = size(sum(tensor.nbytes for tensor in kept.values()))
    print(f"{path}: version {version} of {name}, {len(kept)} tensors, {total}")
    return 0


def _put(path: Path, content: bytes) -> None:
    """The whole file or none, under its name; a half of it is never seen."""
    made = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with open(made, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}; nothing was left there") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(made)
