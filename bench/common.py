"""What all benchmarks share: timing in turns, worker processes, rows, and their table as text, JSON and Markdown.

A benchmark is a list of functions that yield rows. A row is ours beside a floor or a peer: both take turns in one run,
so that a slow moment of the machine hits both, and every byte that arrived is compared before the row is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
# Before torch is imported: one thread in each process, and bench/ on the path of fork servers and actors.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= {
    "PYTHONWARNINGS": "ignore",
    "RL_WARNINGS": "0",
    "RL_LOGGING_LEVEL": "WARNING",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))
warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402

CONTEXT = multiprocessing.get_context("forkserver")  # imports once; a worker starts in 0.1 s
CONTEXT.set_forkserver_preload(["__main__", "tensordict"])
PATIENCE = 120.0  # seconds until a worker's answer counts as missing
HANGS = 200  # seconds until a benchmark's function is given up
AIM = re.compile(r"(?P<beyond>\+ )?(?P<value>[\d.]+) (?P<unit>us|x)$")
seconds = 1.5  # that a row may take; main() sets it

Way = Callable[[], object]


class Missing(Exception):
    """A package that a row needs is not installed."""


@dataclasses.dataclass
class Row:
    """Samples of ours and of what is beside it, in seconds."""

    what: str
    ours: list[float]
    beside: str = ""
    theirs: list[float] = dataclasses.field(default_factory=list)
    aim: str = ""  # "4 us": our median; "+ 6 us": beyond theirs; "1.25 x": the ratio
    section: str = ""
    trouble: str = ""  # why there are no figures

    @property
    def ratio(self) -> float | None:
        if not self.ours or not self.theirs:
            return None
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def noise(self) -> float:
        """How far apart the five parts of the run are, as a part of the whole: half of their range."""
        found = []
        for mine, other in zip(_parts(self.ours), _parts(self.theirs or [1.0] * len(self.ours)), strict=False):
            found.append(statistics.median(mine) / statistics.median(other))
        return (max(found) - min(found)) / 2 / statistics.median(found) if len(found) > 1 else 0.0

    @property
    def met(self) -> bool | None:
        """None: there is no aim, or no figure."""
        aim = AIM.match(self.aim)
        if aim is None or not self.ours:
            return None
        found = statistics.median(self.ours) * 1e6
        if aim["unit"] == "x":
            found = self.ratio or 0.0
        elif aim["beyond"]:
            found -= statistics.median(self.theirs) * 1e6
        return found <= float(aim["value"])

    def cells(self) -> list[str]:
        aim = self.aim.replace("us", "µs")
        if self.trouble:
            return [self.what, self.trouble, self.beside, "", aim]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        noise = f" ± {self.noise:.0%}" if self.noise >= 0.005 else ""
        theirs = f"{self.beside}: {time_of(self.theirs)}" if self.theirs else self.beside
        ours = time_of(self.ours) if self.ours else ""
        if not ratio:
            ours += noise if ours else ""
        return [self.what, ours, theirs, ratio and ratio + noise, f"**missed:** {aim}" if self.met is False else aim]

    def line(self) -> str:
        return "  ".join(cell for cell in self.cells() if cell)

    def as_json(self) -> dict[str, Any]:
        medians = {name: statistics.median(found) if found else None for name, found in
                   (("ours", self.ours), ("theirs", self.theirs))}  # fmt: skip
        return dataclasses.asdict(self) | medians | {"ratio": self.ratio, "noise": self.noise, "met": self.met}


def _parts(samples: list[float]) -> list[list[float]]:
    size = max(1, len(samples) // 5)
    return [samples[begin : begin + size] for begin in range(0, size * min(5, len(samples)), size)]


def time_of(samples: list[float]) -> str:
    value = statistics.median(samples)
    scale, unit = next(
        (s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")) if value >= s or s < 1e-8
    )
    return f"{value / scale:,.0f} {unit}" if value / scale >= 100 else f"{value / scale:.3g} {unit}"


# Timing


def timed(work: Way) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds(most: int, fewest: int = 5, share: float = 1.0) -> Iterator[int]:
    """Count until `most`, or until this share of a row's time is over."""
    end = time.monotonic() + seconds * share
    for number in range(most):
        if number >= fewest and time.monotonic() >= end:
            return
        yield number


def in_turns(*ways: Way, most: int = 2000, batch: int = 1, before: Way | None = None) -> list[list[float]]:
    """Seconds of one call of each way; `before` is called before each sample and is not timed."""
    samples: list[list[float]] = [[] for _ in ways]
    for number in range(-3, most):
        if number == 0:
            end = time.monotonic() + seconds
        if number >= 5 and time.monotonic() >= end:
            break
        for way, found in zip(ways, samples, strict=True):
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(batch):
                way()
            spent = (time.perf_counter() - start) / batch
            if number >= 0:
                found.append(spent)
    return samples


def beside(what: str, ours: Way, name: str, theirs: Way, aim: str = "", **how: Any) -> Row:
    """A row of two ways that take turns."""
    mine, other = in_turns(ours, theirs, **how)
    return Row(what, mine, name, other, aim)


# Weights


def layers(tensors: int, width: int = 14, buffers: int = 0) -> nn.Module:
    """Linear layers of two tensors each."""
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(tensors // 2)]).requires_grad_(False)
    for number in range(buffers):
        module.register_buffer(f"buffer{number}", torch.zeros(width))
    return module


def equal_leaves(tensors: int, nbytes: float) -> nn.ParameterList:
    """`tensors` parameters of equal size."""
    leaves = (torch.zeros(int(nbytes / 4 / tensors)) for _ in range(tensors))
    return nn.ParameterList(nn.Parameter(leaf, requires_grad=False) for leaf in leaves)


def fill(module: nn.Module, value: float) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(value)


def extremes(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The smallest and the largest element: equal if all elements are of one version."""
    tensors = list(tensors)
    if sum(tensor.nbytes for tensor in tensors) <= 4e6:  # then one call costs less than a call for each
        tensors = [torch.cat([tensor.flatten() for tensor in tensors])]
    pairs = [torch.aminmax(tensor) for tensor in tensors]
    return min(float(low) for low, _ in pairs), max(float(high) for _, high in pairs)


# Worker processes


class Crew:
    """Processes that run work(pipe, *arguments) and end when the pipe is closed."""

    def __init__(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        arguments = list(arguments)
        pairs = [CONTEXT.Pipe() for _ in arguments]
        self.pipes: list[Connection] = [ours for ours, _ in pairs]
        self.processes = [
            CONTEXT.Process(target=_run, args=(work, theirs, *each), daemon=True)
            for (_, theirs), each in zip(pairs, arguments, strict=True)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def send(self, message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def answers(self) -> list[Any]:
        found = []
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"worker {index} has not answered for {PATIENCE:.0f} s")
            found.append(pipe.recv())
        return found

    def ask(self, message: Any) -> list[Any]:
        self.send(message)
        return self.answers()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _run(work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    more_files()
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError):  # the benchmark has what it needs
        os._exit(0)


@contextlib.contextmanager
def crew(work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> Iterator[Crew]:
    workers = Crew(work, arguments)
    try:
        yield workers
    finally:
        workers.close()


def more_files() -> None:
    """Raise the limit of open files: torch shares each tensor by a separate descriptor."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def need(*packages: str) -> None:
    import importlib.util

    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Missing(f"not installed: {package}")


# A run


def main(doc: str, sections: dict[str, list[Callable[[], Iterable[Row]]]], *options: str) -> tuple[Any, list[Row]]:
    """Run all functions, or those of some sections; print, save and judge their rows. `options`: more flags."""
    global seconds
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=sections, default=list(sections), help="default: all")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of a row; default {seconds}")
    parser.add_argument("--check", action="store_true", help="end with status 1 if an aim is missed")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    for option in options:
        parser.add_argument(option, action="store_true")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    more_files()
    print(machine(), flush=True)
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # for what other libraries leave behind
        for section, functions in ((name, sections[name]) for name in sections if name in arguments.sections):
            for function in functions:
                rows += list(_rows_of(function, section))
    about = f"{machine()}; {time.monotonic() - began:.0f} s, load at the end {os.getloadavg()[0]:.1f}."
    name = Path(sys.argv[0]).stem
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {"machine": about, "rows": [row.as_json() for row in rows]}
    (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1))
    (arguments.out / f"{name}.md").write_text(f"{about}\n\n{table(rows)}")
    print(about)
    if missed := [row for row in rows if row.met is False]:
        print(f"{len(missed)} of {sum(bool(row.aim) for row in rows)} aims are missed")
    arguments.about = about
    arguments.failed = any(row.trouble.startswith("failed") for row in rows) or (arguments.check and bool(missed))
    return arguments, rows


def end(arguments: Any) -> None:
    """Without waiting for threads of other libraries."""
    sys.stdout.flush()
    os._exit(int(arguments.failed))


def _rows_of(function: Callable[[], Iterable[Row]], section: str) -> Iterator[Row]:
    """The rows of one function; a row with the reason where it fails, lacks a package, or does not end."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"no end after {HANGS} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS)
    name = getattr(function, "__name__", "") or f"{function.func.__name__}{function.args}"  # type: ignore[attr-defined]
    try:
        found = list(function())  # all of them: the checks come after the rows
    except Missing as missing:
        found = [Row(name, [], trouble=str(missing))]
    except Exception as error:
        traceback.print_exc()
        found = [Row(name, [], trouble=f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")]
    finally:
        signal.alarm(0)
    for row in found:
        row.section = section
        print(row.line(), flush=True)
        yield row


def machine() -> str:
    return (
        f"{os.cpu_count()} processors, {platform.machine()}, kernel {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


# Pages


def table(rows: list[Row]) -> str:
    lines = [_line(["what", "shmsync", "floor or peer", "ratio", "aim"]), "|---|---|---|---|---|"]
    for section, group in itertools.groupby(rows, lambda row: row.section):
        lines.append(_line([f"**{section}**", "", "", "", ""]))
        lines += [_line(row.cells()) for row in group]
    return "\n".join(lines) + "\n"


def headlines(rows: list[Row], names: dict[str, str]) -> str:
    """Some rows, by the name of the row and what the page calls it."""
    lines = [_line(["work", "shmsync", "beside", "ratio"]), "|---|---|---|---|"]
    known = {f"{row.what} / {row.beside}": row for row in rows if row.ratio}
    for name, words in names.items():
        if name not in known:
            raise SystemExit(f"this run has no row {name!r}: README.md stays as it is")
        row = known[name]
        lines.append(_line([words, time_of(row.ours), f"{row.beside}: {time_of(row.theirs)}", f"{row.ratio:.2f}"]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def paste(page: Path, name: str, text: str) -> None:
    """Replace what stands in the page between its marks of this name."""
    begin, end = (f"<!-- {name}: {which} -->\n" for which in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} lacks the line {(end if found else begin).strip()!r}")
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}")


def chart(title: str, bars: dict[str, float], ours: str) -> str:
    """Seconds as bars in SVG, the shortest first. `ours` has another colour, and the ratios are to it."""
    label, width, height, top = 330, 330.0, 34, 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top + height * len(bars) + 8}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">{title}</text>',
    ]
    for number, (name, value) in enumerate(sorted(bars.items(), key=lambda bar: bar[1])):
        y, long = top + height * number, max(2.0, width * value / max(bars.values()))
        colour = "#d9480f" if name == ours else "#868e96"
        lines += [
            f'<text x="{label - 10}" y="{y + 20}" text-anchor="end">{name}</text>',
            f'<rect x="{label}" y="{y + 5}" width="{long:.0f}" height="{height - 12}" fill="{colour}"/>',
            f'<text x="{label + long + 8:.0f}" y="{y + 20}">{time_of([value])} ({value / bars[ours]:.2f} x)</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
