"""The fuzzers as a program: python -m support.fuzz.fuzz --of segment --inputs 1000000 --seed 7."""

from __future__ import annotations

import argparse
import logging
import resource
import secrets
import time

from support.fuzz.targets import TARGETS


def run(of: str, *, seed: int, inputs: int) -> dict[str, object]:
    """Try so many inputs; what came of them. Whatever is no typed error is raised."""
    target = TARGETS[of](seed)
    started, before, slowest = time.monotonic(), _peak(), 0.0
    try:
        for tried in range(inputs):
            at = time.thread_time()
            try:
                target.once()
            except BaseException as error:
                error.add_note(f"target {of}, seed {seed}, input {tried}") if hasattr(error, "add_note") else None
                raise
            slowest = max(slowest, time.thread_time() - at)
    finally:
        target.close()
    return {
        "target": of, "seed": seed, "inputs": inputs, "refused": target.refused, "read": target.accepted,
        "seconds": round(time.monotonic() - started, 1), "slowest": round(slowest, 4),
        "memory": _peak() - before,
    }  # fmt: skip


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run one fuzzer, or all by turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--inputs", type=int, default=10_000, help="for each target")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    chosen = parser.parse_args()
    logging.getLogger("shmsync").setLevel(logging.ERROR)
    for of in TARGETS if chosen.of == "all" else [chosen.of]:
        print(run(of, seed=chosen.seed, inputs=chosen.inputs))


if __name__ == "__main__":
    main()
