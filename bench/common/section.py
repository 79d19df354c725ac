"""One section of the table in a separate process; table.py starts it, with bench/ on its path.

    python -m common.section MODULE[:FUNCTION] SECONDS STARTED RESULT.jsonl

Each row is a line of the result as soon as it is known.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from common.clock import Clock


def main() -> None:
    module, seconds, started, result = sys.argv[1:]
    # Contests and clusters end what they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("its time is over"))
    name, _, function = module.partition(":")
    rows = getattr(importlib.import_module(name), function or "rows")
    gc.collect()
    gc.freeze()  # later collections skip the objects of the imports
    with Path(result).open("a") as file:
        for row in rows(Clock(float(seconds), time.time() - float(started))):
            file.write(json.dumps(row.as_json()) + "\n")
            file.flush()
    sys.stdout.flush()
    os._exit(0)  # threads of TorchRL's would wait for others that are gone


if __name__ == "__main__":
    main()
