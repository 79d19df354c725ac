"""Plant one fault at a time in a copy of the package, and show that the tests named beside it fail.

    make planted-faults                          every fault; those of the native core need a build each
    make planted-faults ARGS="engine/write"      those whose path contains a word
    make planted-faults ARGS=--check             only that each text to replace is there, once, and each test file

Run it before and after tests are made fewer: what was found before must be found after. A fault is a text of one file,
what stands in its place, and test files that must notice. A text that is not there exactly once is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "planted"


class Fault(NamedTuple):
    """A fault. `path`: below the root; `tests`: below tests/, one of which must fail."""

    path: str
    text: str
    instead: str
    tests: str


FAULTS = [
    # engine
    Fault("shmsync/engine/outcome.py", "if self.dead:", "if False:", "conformance/trouble/test_death.py"),
    Fault("shmsync/engine/deadlines.py", "not timeout >= 0:", "timeout < 0:", "unit/project/test_arguments.py"),
    Fault("shmsync/engine/source/sources.py", "if filter is None or filter.admits(",
          "if True or filter.admits(", "unit/source/test_weights.py unit/write/test_publish.py"),
    Fault("shmsync/engine/source/leaf_check.py", "if held < needed:", "if False:", "unit/source/test_odd_tensors.py"),
    Fault("shmsync/engine/write/copy_plan.py", "if tensors.overlaps(self._arena.ranges()):", "if False:",
          "unit/source/test_odd_tensors.py"),
    Fault("shmsync/engine/converting.py", "self._convert(slot, range(len(self._leaves)))", "pass",
          "unit/source/test_dtypes.py"),
    Fault("shmsync/engine/converting.py", "            self._recorded.clear()", "            pass",
          "engine/device/test_to_the_host.py"),
    Fault("shmsync/engine/converting.py", "leaf.offset - end >= TENSOR_ALIGNMENT", "False",
          "engine/device/test_to_the_host.py"),
    Fault("shmsync/engine/write/device_writes.py", "device.follow(device.current(), made_by)", "pass",
          "engine/device/test_copies_on_a_device.py"),
    Fault("shmsync/engine/bind/binding.py", "            self._synchronize()\n            with plainly():",
          "            with plainly():", "engine/device/test_private_copies.py"),
    Fault("shmsync/engine/bind/binding.py", "if known is not None and known.capturing(known.current()):", "if False:",
          "engine/device/test_private_copies.py"),
    Fault("shmsync/engine/write/copy_plan.py", "known.update(given)", "pass", "unit/write/test_carry.py"),
    Fault("shmsync/engine/write/acks.py", "[worker for worker in self._workers or () if worker not in known]", "[]",
          "unit/write/test_publish_wait.py"),
    Fault("shmsync/engine/write/acks.py", "is not None and peer.dead}", "is not None and False}",
          "workers/test_workers.py"),
    Fault("shmsync/engine/write/slot_writer.py", "if not self.peers.alive(owner)]", "if False]",
          "engine/death/test_reader_death.py"),
    Fault("shmsync/engine/write/slot_writer.py", "return any(self.peers.state(owner) is stopped",
          "return False and any(self.peers.state(owner) is stopped", "engine/death/test_stopped.py"),
    Fault("shmsync/engine/write/writer.py", "        self.refuse_poisoned()\n        if self.worker",
          "        if self.worker", "engine/faults/test_failed_updates.py"),
    Fault("shmsync/engine/read/successor.py", "if manifest != current.manifest:", "if False:",
          "engine/versions/test_follow.py"),
    Fault("shmsync/engine/bind/guard.py", "self._clones = clones", "self._clones = False",
          "unit/bind/test_output_containers.py"),
    Fault("shmsync/engine/bind/binding.py", "if path is not None and path is not reader:", "if False:",
          "unit/bind/test_bind_again.py"),
    Fault("shmsync/engine/write/optimizer_steps.py", "if stray(", "if False and stray(",
          "unit/adopt/test_adopt_steps.py"),
    Fault("shmsync/engine/write/adoption.py", "_native.set_data([tensor for tensor, _ in placed], private)", "pass",
          "unit/adopt/test_adopt.py"),
    Fault("shmsync/engine/write/adoption.py", "old.data = old.data.clone()", "pass",
          "unit/source/test_replaced.py unit/adopt/test_adopt.py"),
    # memory
    Fault("shmsync/memory/manifest.py", "if not 0 <= leaf.offset <= leaf.offset + leaf.nbytes <= slot_bytes:",
          "if False:", "unit/memory/test_hostile_segments.py"),
    Fault("shmsync/memory/segment_file.py", "return not Peer(owner=header.owner).dead", "return False",
          "engine/death/test_leftovers.py"),
    Fault("shmsync/memory/segment.py", "if session is not None and header.session != session:", "if False:",
          "unit/read/test_subscribe.py engine/death/test_writer_death.py"),
    Fault("shmsync/memory/slab.py", "if os.fstat(fd).st_ino != place.inode:", "if False:",
          "unit/memory/test_sealed.py"),
    Fault("shmsync/memory/process.py", "self._replaced = not _native.may_be_same_owner(found, self._owner)",
          "self._replaced = False", "engine/death/test_exec.py limits/test_identities.py"),
    Fault("shmsync/memory/cuda/gpu.py", "if own is not None:", "if False:", "unit/memory/cuda/test_gpu_memory.py"),
    # schemes: answers
    Fault("shmsync/schemes/links.py", "for tag in self.unanswered:", "for tag in reversed(self.unanswered):",
          "conformance/trouble/test_late_answers.py"),
    Fault("shmsync/schemes/links.py", "if result is None and (link.ended", "if False and (link.ended",
          "conformance/trouble/test_death.py"),
    Fault("shmsync/schemes/links.py", "and tag[1] > self.highest.get(tag[0], 0)", "and False",
          "conformance/trouble/test_messages.py"),
    Fault("shmsync/schemes/sender.py", "link.highest.get(self._model_id, 0)", "0",
          "conformance/trouble/test_late_answers.py"),
    Fault("shmsync/schemes/sender.py", "posted.workers[index].reported = True", "pass",
          "conformance/trouble/test_death.py"),
    Fault("shmsync/schemes/sender.py", "self._lock = threading.Lock()", "self._lock = threading.Semaphore(9)",
          "conformance/trouble/test_threads.py"),
    Fault("shmsync/schemes/receiver.py", "            self._use(message)\n        except",
          "            message.kind == UPDATE or self._use(message)\n        except",
          "conformance/sends/test_send.py"),
    # schemes: weights
    Fault("shmsync/schemes/strategy.py", "if not (present or self.partial):", "if not present:",
          "conformance/sends/test_partial.py"),
    Fault("shmsync/schemes/multiprocess.py", "(again and self._scheme.partial)", "False",
          "conformance/sends/test_partial.py"),
    Fault("shmsync/schemes/arenas.py", "if other not in workers and self.of(other) in wanted:", "if False:",
          "conformance/sends/test_shared.py"),
    # schemes: several machines
    Fault("shmsync/schemes/remote/base.py", "transport.reported = dead.final", "pass",
          "remote/test_sends.py"),
    Fault("shmsync/schemes/remote/base.py", "    if left_out:", "    if False:",
          "remote/test_node_fan_out.py"),
    Fault("shmsync/schemes/remote/rpc.py", "if len(infos) != len(rrefs):", "if False:",
          "remote/test_sends.py"),
    # workers, collectors, integrations, cli
    Fault("shmsync/workers/pool.py", "if member.failure is None and self._restarts[rank] > 0:", "if False:",
          "workers/test_deaths.py"),
    Fault("shmsync/workers/process.py", "self.failure = self.failure or content", "pass", "workers/test_exceptions.py"),
    Fault("shmsync/collectors/collector.py", "if lag <= self._max_lag:", "if True:",
          "collectors/test_weights.py"),
    Fault("shmsync/collectors/rollout.py", "self._returns[i] = 0.0", "pass", "collectors/frames/test_frames.py"),
    Fault("shmsync/integrations/torchrl/sender.py", "if not members <= living or any(", "if False and any(",
          "integrations/collectors/weights/test_updates.py"),
    Fault("shmsync/integrations/torchrl/frames.py", "used, before = self._reader.used_version,",
          "used, before = self._reader.used_version + 1,", "integrations/collectors/weights/test_versions.py"),
    Fault("shmsync/cli/listing.py", 'say(f"would remove {seen.name}{why}")', 'say(f"would keep {seen.name}{why}")',
          "engine/observe/test_observed.py"),
    Fault("shmsync/cli/top.py", "(each not in front, -each.lag", "(each in front, -each.lag",
          "programs/test_top.py"),
    # the native core
    Fault("native/bind/source_plan.cpp", "return leaves_[pair.first].bytes == 0 ||", "return true ||",
          "unit/source/test_sources_made_anew.py"),
    Fault("native/src/publication.cpp", "if (k == current_slot_ || pinned[k]) continue;",
          "if (k == current_slot_) continue;", "unit/read/test_sections.py engine/versions/test_never_torn.py"),
    Fault("native/src/publication.cpp", "return acked >= version && acked <= version_;", "return acked >= version;",
          "engine/faults/test_garbage_in_the_reader_table.py"),
    Fault("native/src/read_section.cpp", "if (half_written && state() != State::open) return Enter::poisoned;", "",
          "unit/write/test_update.py engine/faults/test_failed_updates.py"),
    Fault("native/src/reader_table.cpp", "rows_[row].owner.store(0, std::memory_order_release);", "",
          "unit/read/test_subscribe.py engine/versions/test_close.py engine/death/test_reader_death.py"),
    Fault("native/src/copy.cpp", "total > kStreamAbove ? CopyPath::streaming",
          "total > kStreamAbove ? (--count, CopyPath::streaming)",
          "engine/versions/test_never_torn.py"),
]  # fmt: skip


def planted(fault: Fault) -> str:
    """The file with the fault in it."""
    text = (ROOT / fault.path).read_text()
    if (found := text.count(fault.text)) != 1:
        raise SystemExit(f"{fault.path} has {fault.text!r} {found} times, but once is needed; choose another text")
    if absent := [name for name in fault.tests.split() if not (ROOT / "tests" / name).is_file()]:
        raise SystemExit(f"tests/ lacks {', '.join(absent)}, named for a fault in {fault.path}")
    return text.replace(fault.text, fault.instead)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command, from a folder in which no shmsync/ shadows the package under test."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd="/", env=os.environ | environment, capture_output=True, text=True, check=False)


def copy_of_the_package() -> Path:
    """The installed package once more, in a folder that PYTHONPATH puts before it."""
    site = WORK / "site"
    where = "import importlib.util as i; print(i.find_spec('shmsync').submodule_search_locations[0])"
    installed = run(sys.executable, "-c", where).stdout.strip()
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(installed, site / "shmsync", ignore=shutil.ignore_patterns("__pycache__"))
    return site


def built(path: str, text: str) -> Path:
    """The package with another text of a native file."""
    source, site = WORK / "source", WORK / "built"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        there = source / name
        content = text.encode() if name == path else (ROOT / name).read_bytes()
        if not there.exists() or there.read_bytes() != content:  # else cmake would compile it again
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site]
    done = run(*pip, "-C", f"build-dir={WORK}/cmake", source)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return site


def first_failure(fault: Fault, site: Path) -> str:
    """The first test that fails with the fault; "" when all of them pass."""
    options = ["-q", "-x", "--timeout", "100", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    tests = [ROOT / "tests" / name for name in fault.tests.split()]
    done = run(sys.executable, "-m", "pytest", *options, *tests, PYTHONPATH=str(site))
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:  # a timeout ends the process where it stands
        hangs = re.search(r"Timeout", done.stdout + done.stderr)
        end = (done.stdout + done.stderr)[-500:]
        return "a test hangs" if hangs else f"the run ended with {done.returncode}: {end}"
    return found[1]


def main() -> int:
    """Plant the faults that are asked for; 1 when the tests miss one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose path contains one of these")
    parser.add_argument("--check", action="store_true", help="plant nothing")
    arguments = parser.parse_args()
    chosen = [each for each in FAULTS if not arguments.words or any(word in each.path for word in arguments.words)]
    texts = [planted(fault) for fault in chosen]
    if arguments.check:
        return 0
    site, missed = copy_of_the_package(), 0
    for fault, text in zip(chosen, texts, strict=True):
        begun = time.monotonic()
        if fault.path.startswith("native/"):
            found = first_failure(fault, built(fault.path, text))
        else:
            target = site / fault.path
            kept = target.read_text()
            target.write_text(text)
            found = first_failure(fault, site)
            target.write_text(kept)
        missed += not found
        print(f"{time.monotonic() - begun:5.0f} s  {fault.path}: {fault.text!r}: {found or 'MISSED'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
