"""Draws `shmsync top` as it is on a terminal while a stopped worker blocks a trainer, into the SVG file that is named.

docs/observing.md shows what `python tools/top_picture.py docs/plots/top.svg` draws.
"""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

import shmsync

COLUMNS, LINES, LOOKS, STOPS = 84, 11, 14, 2
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px }}
{styles}</style>
<rect width="100%" height="100%" rx="6" fill="#292929"/>
<g transform="translate(9, -2)" class="{unique_id}-matrix">{backgrounds}{matrix}</g>
</svg>
"""


def work(sub: shmsync.Subscriber) -> None:
    """Apply versions; one worker stops itself inside a read section."""
    for version in sub.versions():
        with sub.read():
            if sub.worker == STOPS and version > 100:
                os.kill(os.getpid(), signal.SIGSTOP)
                return


def watched(name: str) -> str:
    """The last frame that the command draws on a terminal of this size, with the escapes of its colours."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [Path(sys.executable).with_name("shmsync"), "top", name, "--count", str(LOOKS), "--interval", "0.4"]
    environment = os.environ | {"TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, close_fds=True, env=environment):
        os.close(theirs)
        drawn = b""
        try:
            while part := os.read(ours, 1 << 16):
                drawn += part
        except OSError:  # the command has ended
            os.close(ours)
    frame = drawn.decode().split("\x1b[?1049l")[0].split("\x1b[H")[-1]
    return re.sub(r"\x1b\[[0-9;?]*[A-Zac-ln-z]", "", frame).replace("\r", "")


def main() -> None:
    """Train until the stopped worker is in the way, and draw what the command shows meanwhile."""
    frames: list[str] = []
    with (
        shmsync.Publisher(torch.nn.Linear(64, 64), name="policy", slots=2, timeout=6) as pub,
        shmsync.Workers(pub, work, 4) as workers,
    ):
        top = threading.Thread(target=lambda: frames.append(watched("policy")))
        top.start()
        try:
            while True:
                pub.publish()
                time.sleep(0.01)
        except shmsync.ReaderStalled as error:
            print(error)
        top.join()
        pid = workers.procs[STOPS].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO(), color_system="standard")
    console.print(Text.from_ansi(frames[0]), end="")
    drawing = console.export_svg(title="", code_format=FRAME)
    drawing = re.sub(r' clip-path="[^"]*"', "", drawing)  # FRAME has no clip paths
    Path(sys.argv[1]).write_text(re.sub(r"<text[^>]*>(\s|&#160;)*</text>", "", drawing))


if __name__ == "__main__":
    main()
