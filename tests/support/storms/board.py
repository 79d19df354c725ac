"""What a storm and its workers write for each other: rows of a file that all of them map.

A worker that is killed in the middle of anything has left there what it did last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

from support.storms.judge import Judge
from support.worker import fork_server

ROWS, RING = 512, 256
_FIELDS = ("pid", "command", "phase", "forwards", "torn", "wrong", "backwards", "detail", "changes")
_WIDTH = 16 + 2 * RING + 2 * RING
NOTHING, STOP, EXIT = range(3)  # the commands to a worker
IDLE, RECEIVING, COMPUTING, REFUSED = range(4)  # where it is; refused: no version is whole


class Board:
    """The rows of a file. Each word has one writer."""

    def __init__(self, path, *, make=False):
        self.path = str(path)
        self._fd = os.open(self.path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        if make:
            os.ftruncate(self._fd, ROWS * _WIDTH * 8)
        self._map = mmap.mmap(self._fd, ROWS * _WIDTH * 8)
        self._words = memoryview(self._map).cast("q")

    def row(self, index):
        return Row(self._words[index * _WIDTH : (index + 1) * _WIDTH])

    def close(self):
        self._words.release()
        with contextlib.suppress(BufferError):  # a row that was not closed keeps it
            self._map.close()
        os.close(self._fd)


class Row:
    """One life of one worker."""

    def __init__(self, words):
        self._words = words

    def get(self, name):
        return self._words[_FIELDS.index(name)]

    def set(self, name, value):
        self._words[_FIELDS.index(name)] = value

    def add(self, name):
        self._words[_FIELDS.index(name)] += 1

    def forward(self, start, number):
        """Note a forward that began at `start` and computed with the weights of this number."""
        count = self.get("forwards")
        place = 16 + 2 * (count % RING)
        self._words[place], self._words[place + 1] = start, number
        if count == 0 or self._words[16 + 2 * ((count - 1) % RING) + 1] != number:
            self.change(time.monotonic_ns(), number)
        self.set("forwards", count + 1)

    def change(self, when, number):
        """Note another number than before."""
        changes = self.get("changes")
        place = 16 + 2 * RING + 2 * (changes % RING)
        self._words[place], self._words[place + 1] = when, number
        self.set("changes", changes + 1)

    def last(self):
        """(start, number) of the last forward; (0, 0) before the first."""
        count = self.get("forwards")
        if count == 0:
            return 0, 0
        place = 16 + 2 * ((count - 1) % RING)
        return self._words[place], self._words[place + 1]

    def numbers(self):
        """(when, number) for each of the last changes of number, oldest first."""
        count = self.get("changes")
        places = [16 + 2 * RING + 2 * (each % RING) for each in range(max(0, count - RING + 8), count)]
        return [(self._words[place], self._words[place + 1]) for place in places]

    def seen(self, number):
        """When a forward first computed with weights at least that new; None: not yet."""
        return next((when for when, each in self.numbers() if each >= number), None)

    def close(self):
        self._words.release()


def beat(path, stop):
    """A process that sleeps 5 ms again and again, and notes when it was woken later than that: so late is the machine
    itself."""
    board = Board(path)
    row = board.row(ROWS - 1)
    while not stop.is_set():
        start = time.monotonic_ns()
        time.sleep(0.005)
        late = time.monotonic_ns() - start - 5_000_000
        if late > 10_000_000:
            row.change(start, late)
        row.set("forwards", time.monotonic_ns())
    row.close()
    board.close()


class Lateness:
    """How late the machine was, by the process that beats."""

    def __init__(self, board):
        self._row = board.row(ROWS - 1)
        self.worst = 0.0

    def between(self, start, end):
        """Seconds by which it was late at worst in that time, in ns."""
        while self._row.get("forwards") < end:  # it has not beaten since
            if time.monotonic_ns() > end + 20_000_000_000:
                break
            time.sleep(0.001)
        late = [each for when, each in self._row.numbers() if when < end and when + each + 5_000_000 > start]
        found = max(late, default=0) / 1e9
        self.worst = max(self.worst, found)
        return found

    def close(self):
        self._row.close()


class Sky:
    """What all storms have: the board, the lateness of the machine, the judge and the log."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed = seed
        self.log = deque(maxlen=60)
        self.counts = Counter()
        self._folder = tempfile.TemporaryDirectory()
        self.board = Board(Path(self._folder.name, "board"), make=True)
        context = fork_server()
        self._stop = context.Event()
        self._heart = context.Process(target=beat, args=(self.board.path, self._stop), daemon=True)
        self._heart.start()
        heart = self.board.row(ROWS - 1)
        while not heart.get("forwards"):
            time.sleep(0.01)
        heart.close()
        self.lateness = Lateness(self.board)
        self.judge = Judge(self.lateness)
        self._rows = 0
        self.pids = set()

    def new_row(self):
        """A row for one more life; its number. Rows are used again when all are used."""
        number = self._rows % (ROWS - 1)
        self._rows += 1
        row = self.board.row(number)
        for place in range(len(row._words)):
            row._words[place] = 0
        return number, row

    def note(self, text):
        self.log.append(f"{time.monotonic():.4f} {text}")

    def close(self):
        self._stop.set()
        self._heart.join()
        self._heart.close()
        self.lateness.close()
        self.board.close()
        self._folder.cleanup()
