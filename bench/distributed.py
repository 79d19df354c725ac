"""How long does one send take over Ray, RPC or torch.distributed, from the call until every worker has the weights?

    python bench/distributed.py                       every engine, 1 and 2 nodes, 1, 2, 4 and 8 workers
    python bench/distributed.py --quick               1 and 4 workers, few rounds
    python bench/distributed.py --engine rpc --workers 4 --nodes 2 --sizes "100 MB"
    python bench/distributed.py --out DIR             where distributed.json and .md go (default ./bench-results)

In each cell of a table shmsync's scheme, the same by node (fan_out="node"), TorchRL's scheme for the same engine and
the engine's bare means take turns, in the same processes, with the same module. In every worker each has a module of
its own, which has the weights when a send returns: copied into it, or bound to it. Checksums in every worker prove that
before anything is printed. Each process has one thread to compute. Only the ratios mean anything.

With one node all workers are beside the trainer. With two they are all on the other one. For Ray that is a second node
of a cluster in this machine, with a store of its own. For RPC and torch.distributed it is a name that is given to the
workers: a relay among them makes their arena, and everything goes over loopback. So the network costs nothing here: the
fewer copies cross it, the more a real one would favour.

The engine ray-zero-copy is Ray with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 for all who take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import distributed_cell
import distributed_report
import torch

ENGINES = {"ray": "Ray", "ray-zero-copy": "Ray, zero-copy tensors", "rpc": "RPC", "distributed": "torch.distributed"}
MODULES = {"ray-zero-copy": "ray", "distributed": "ranks"}  # where a file is called otherwise
VARIABLES = {"ray-zero-copy": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}  # of everything in a cell; elsewhere unset
Row = dict[str, Any]


def cell(engine: str, nodes: int, workers: int, sizes: list[str], seconds: float, patience: float) -> list[Row]:
    """Its rows, measured in fresh processes: those of RPC have one life."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "rows.json"), Path(folder, "stderr")
        words = [MODULES.get(engine, engine), nodes, workers, seconds, result, *sizes]
        command = [sys.executable, distributed_cell.__file__, *map(str, words)]
        unset = {variable for variables in VARIABLES.values() for variable in variables}
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment |= VARIABLES.get(engine, {})
        with errors.open("w") as stderr:
            # From an empty folder: Ray puts the working directory on the path of its actors.
            process = subprocess.Popen(
                command, stdout=stderr, stderr=stderr, cwd=folder, start_new_session=True, env=environment
            )
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                print(f"{engine}: no end after {patience:g} seconds", file=sys.stderr)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode or not result.exists():
            print(errors.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"{engine} with {workers} workers on {nodes} nodes failed; see above")
        rows: list[Row] = json.loads(result.read_text())
    for row in rows:
        row["engine"] = engine
        distributed_report.add_ratios(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 4 workers, few rounds")
    parser.add_argument("--engine", choices=ENGINES, nargs="*", default=list(ENGINES), help="default: all")
    parser.add_argument("--nodes", nargs="*", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--workers", nargs="*", type=int, help="default: 1 2 4 8")
    parser.add_argument("--sizes", nargs="*", choices=distributed_cell.WIDTHS, default=list(distributed_cell.WIDTHS))
    parser.add_argument("--seconds", type=float, help="for each row")
    parser.add_argument("--patience", type=float, default=300, help="seconds until a cell counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the cell
    quick = arguments.quick
    seconds = (3.0 if quick else 15.0) if arguments.seconds is None else arguments.seconds
    workers = arguments.workers or ([1, 4] if quick else [1, 2, 4, 8])
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"  # of every process that starts from here on
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else whatever else runs here slows actors alone
    # Fork servers and actors have another sys.path.
    paths = [str(Path(__file__).resolve().parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors, one thread each", flush=True)
    tables: dict[str, list[Row]] = {}
    for engine in arguments.engine:
        rows = tables[ENGINES[engine]] = []
        for nodes in arguments.nodes:
            for count in workers:
                rows += cell(engine, nodes, count, arguments.sizes, seconds, arguments.patience)
                save(arguments.out, tables)
        distributed_report.show(ENGINES[engine], distributed_report.ordered(rows))


def save(out: Path, tables: dict[str, list[Row]]) -> None:
    """What is there so far: all of it takes long."""
    results = {"torch": torch.__version__, "processors": multiprocessing.cpu_count(), "engines": tables}
    out.mkdir(parents=True, exist_ok=True)
    (out / "distributed.json").write_text(json.dumps(results, indent=2))
    (out / "distributed.md").write_text(distributed_report.markdown(tables))


if __name__ == "__main__":
    main()
