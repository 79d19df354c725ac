"""What all storms have: the board, the lateness of the machine, the judge, the log, and what is there before."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

from support.storms.board import ROWS, Board, Lateness, beat
from support.storms.judge import Judge
from support.worker import fork_server


class Sky:
    """What all storms have: the board, the lateness of the machine, the judge, the log, and what is there before."""

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
        self._sections = self._glances = 0
        self._struck = {}  # kinds of trouble, and when, since when no call has reached all workers
        self.recovery = {}  # the longest time in seconds until one did, by kind
        self.pids = set()

    def new_row(self):
        """A row for one more life; its number. Rows are used again when all are used."""
        number = self._rows % (ROWS - 1)
        self._rows += 1
        row = self.board.row(number)
        self._sections += row.get("forwards")
        self._glances += row.get("glances")
        for place in range(len(row._words)):
            row._words[place] = 0
        return number, row

    def sections(self):
        """How many sections there were that looked at all elements, and that looked at a few, of all workers."""
        rows = [self.board.row(number) for number in range(min(self._rows, ROWS - 1))]
        whole = self._sections + sum(row.get("forwards") for row in rows)
        glances = self._glances + sum(row.get("glances") for row in rows)
        for row in rows:
            row.close()
        return whole, glances

    def struck(self, kind):
        """A trouble begins."""
        self._struck.setdefault(kind, time.monotonic())

    def recovered(self):
        """A call has reached all its workers."""
        now = time.monotonic()
        for kind, since in self._struck.items():
            self.recovery[kind] = max(self.recovery.get(kind, 0.0), now - since)
        self._struck.clear()

    def note(self, text):
        self.log.append(f"{time.monotonic():.4f} {text}")

    def close(self):
        self._stop.set()
        self._heart.join()
        self._heart.close()
        self.lateness.close()
        self.board.close()
        self._folder.cleanup()
