"""Ways in which a name in /dev/shm can belong to another user or program, or be no segment at all."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from support.processes import segment_path

STRANGER = 12345  # a uid that no user has


def link_to_nowhere(path, arena):
    path.symlink_to("/nowhere")


def link_to_a_file(path, arena):
    """A file of root's that a sweeper, or a creator, would harm."""
    target = path.with_name(f"target.{path.name}")
    target.write_bytes(b"precious")
    path.symlink_to(target)


def link_to_an_arena(path, arena):
    path.symlink_to(segment_path(arena))


def link_to_itself(path, arena):
    path.symlink_to(path)


def folder(path, arena):
    path.mkdir()


def full_folder(path, arena):
    path.mkdir()
    (path / "file").write_bytes(b"precious")


def fifo(path, arena):
    os.mkfifo(path)


def unix_socket(path, arena):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.close()


def text_file(path, arena):
    path.write_text("# notes of somebody who likes this name\n" * 100)
    path.chmod(0o600)


def file_of_garbage(path, arena):
    path.write_bytes(os.urandom(200_000))
    path.chmod(0o600)


def given_to_a_stranger(path, made):
    """Under its name it is a stranger's from the start: an unfinished file of ours is for any process to remove."""
    made.chmod(0o666)
    os.chown(made, STRANGER, STRANGER)
    made.rename(path)


def strangers_file(path, arena):
    made = path.with_name(f"made.{path.name}")
    made.write_bytes(bytes(200_000))
    given_to_a_stranger(path, made)


def strangers_arena(path, arena):
    """A copy of a living arena's segment that belongs to a stranger, and that all may open."""
    given_to_a_stranger(path, Path(shutil.copyfile(segment_path(arena), path.with_name(f"made.{path.name}"))))


def arena_for_all(path, arena):
    """Ours, of the right content, but all users could have written it."""
    shutil.copyfile(segment_path(arena), path)
    path.chmod(0o666)


NEED_ROOT = (strangers_file, strangers_arena)
KINDS = (
    link_to_nowhere, link_to_a_file, link_to_an_arena, link_to_itself, folder, full_folder, fifo, unix_socket,
    text_file, file_of_garbage, *NEED_ROOT, arena_for_all,
)  # fmt: skip


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.with_name(f"target.{path.name}").unlink(missing_ok=True)
