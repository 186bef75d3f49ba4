"""The kernels' threads: they sleep, are no more than was asked for, and disturb nobody."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.ops import LINEAR
from src.ops.build.units import SOURCES
from src.ops.runtime.calls import use_threads
from src.ops.runtime.kernel_library import KernelLibrary
from src.ops.runtime.places import Places

ROOT = Path(__file__).parents[3]
TASKS = Path("/proc/self/task")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for threads")


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    yield
    use_threads(0)


@pytest.fixture
def fresh(level_files: dict[str, Path], tmp_path: Path) -> KernelLibrary:
    """One whose pool nobody has used: a file of another name is another library."""
    name = next(name for name, path in reversed(level_files.items()) if path.exists())
    library = KernelLibrary(Path(shutil.copy(level_files[name], tmp_path)))
    library.assume_wake_cost(0.01)
    return library


PARTS = """
#include <cstdio>
#include "runtime/parallel.h"
extern "C" void slipstream_assume_wake_cost(double);
int main() {
  slipstream_assume_wake_cost(1e-3);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> done{0}, again{0};
    bool raised = false;
    try {
      parallel(4, 40, [&](int part) {
        if (part == round % 40) throw std::bad_alloc();
        done.fetch_add(1);
      });
    } catch (const std::bad_alloc&) {
      raised = true;
    }
    parallel(4, 40, [&](int) { again.fetch_add(1); });
    if (!raised || done != 39 || again != 40) return 1;
  }
  std::puts("200 rounds");
}
"""


ALONG = """
#include <cstdio>
#include <vector>
#include "runtime/parallel.h"
extern "C" void slipstream_assume_wake_cost(double);
int main() {
  slipstream_assume_wake_cost(1e-3);
  for (int round = 0; round < 400; ++round) {
    const int64_t threads = round % 40 ? 1 + round % 5 : 40;
    const int64_t parts = round % 7 == 0 ? threads : 1 + round;
    std::vector<std::atomic<int>> times(parts);
    parallel_along(threads, parts, [&](int64_t part) {
      times[part].fetch_add(1);
    });
    for (auto& each : times) {
      if (each != 1) return 1;
    }
    bool raised = false;
    try {
      parallel_along(threads, parts, [&](int64_t part) {
        if (part == round % parts) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      raised = true;
    }
    if (!raised) return 2;
  }
  std::puts("400 rounds");
}
"""


WATCH = """
#include <sys/resource.h>
#include <unistd.h>
#include <cstdio>
#include "runtime/parallel.h"
double used() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_utime.tv_sec + usage.ru_utime.tv_usec * 1e-6 + usage.ru_stime.tv_sec +
         usage.ru_stime.tv_usec * 1e-6;
}
int main() {
  const double asleep = slipstream_begin_cost();
  int seen = 0;
  for (int round = 0; round < 50; ++round) {
    slipstream_rouse(4);
    bool watched = false;
    // Nobody need have come where all CPUs are busy.
    for (int i = 0; i < 1000 && !watched; ++i) {
      watched = slipstream_begin_cost() < asleep;
      usleep(20);
    }
    seen += watched;
    for (int i = 0; i < 1000 && slipstream_begin_cost() < asleep; ++i) usleep(2000);
    if (slipstream_begin_cost() < asleep) return 1;
  }
  if (worthwhile_parts(4, asleep) != 1) return 2;
  const double before = used();
  usleep(300000);
  if (used() - before > 0.1) return 3;
  std::atomic<int> done{0};
  for (int i = 0; i < 100; ++i) {
    slipstream_rouse(4);
    parallel(4, 8, [&](int) { done.fetch_add(1); });
  }
  std::printf("%d %d\\n", seen > 0, int(done));
  return 0;
}
"""

# While a step is under way a helper keeps watch for longer than a moment; afterwards it does not.
STEP = """
#include <time.h>
#include <unistd.h>
#include <cstdio>
#include "runtime/parallel.h"
int main() {
  const double asleep = slipstream_begin_cost();
  // Rounds in which somebody keeps watch 1.5 ms after the last work, in a step and after it: a few
  // in either case, where the system had taken the CPU away.
  bool longer = false;
  for (int attempt = 0; attempt < 5 && !longer; ++attempt) {
    int during = 0, afterwards = 0;
    for (int round = 0; round < 100; ++round) {
      slipstream_begin_step(2);
      for (int i = 0; i < 1000 && slipstream_begin_cost() == asleep; ++i) usleep(20);
      parallel(2, 2, [](int) {});
      usleep(1500);
      during += slipstream_begin_cost() < asleep;
      slipstream_end_step();
      usleep(1500);
      afterwards += slipstream_begin_cost() < asleep;
      for (int i = 0; i < 1000 && slipstream_begin_cost() < asleep; ++i) usleep(2000);
      if (slipstream_begin_cost() < asleep) return 1;
    }
    longer = during > afterwards + 15;
  }
  // Forgotten, a step does not keep anybody awake for good.
  slipstream_begin_step(2);
  usleep(500000);
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  usleep(300000);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  if (after.tv_sec - before.tv_sec + (after.tv_nsec - before.tv_nsec) * 1e-9 > 0.1) return 2;
  std::printf("%d\\n", longer);
  return 0;
}
"""

# Where a helper may run: asleep, not where its caller was last; at work, wherever it could before.
# With an argument, somebody tells a sleeping helper another CPU, and that holds.
PLACES = """
#include <dirent.h>
#include <sched.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <string>
#include "runtime/parallel.h"
int helper() {
  DIR* tasks = opendir("/proc/self/task");
  int found = -1;
  while (dirent* entry = readdir(tasks)) {
    const int id = std::atoi(entry->d_name);
    if (id > 0 && id != getpid()) found = id;
  }
  closedir(tasks);
  return found;
}
bool may(int id, const cpu_set_t& cpus) {
  cpu_set_t now;
  return sched_getaffinity(id, sizeof now, &now) == 0 && CPU_EQUAL(&now, &cpus);
}
bool comes_to(int id, const cpu_set_t& cpus) {
  for (int i = 0; i < 5000; ++i) {
    if (may(id, cpus)) return true;
    usleep(1000);
  }
  return false;
}
// Whether all that the helper does here it does where it may.
bool work(const cpu_set_t& cpus) {
  std::atomic<int> helped{0}, wrong{0};
  for (int round = 0; round < 1000 && helped == 0; ++round) {
    parallel(2, 4, [&](int) {
      usleep(2000);
      if (gettid() == getpid()) return;
      helped.fetch_add(1);
      if (!may(0, cpus)) wrong.fetch_add(1);
    });
  }
  return helped > 0 && wrong == 0;
}
int main(int count, char**) {
  cpu_set_t all;
  sched_getaffinity(0, sizeof all, &all);
  if (CPU_COUNT(&all) < 2) return 0;
  // The helper's parts are so long that its caller slept, too.
  if (!work(all) || !may(0, all)) return 1;
  const int id = helper();
  int moves = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE && moves < 6; ++cpu) {
    if (!CPU_ISSET(cpu, &all)) continue;
    ++moves;
    cpu_set_t here, others = all;
    CPU_ZERO(&here);
    CPU_SET(cpu, &here);
    CPU_CLR(cpu, &others);
    sched_setaffinity(0, sizeof here, &here);
    // Asleep already, it is kept from there; and again when it goes back to sleep.
    slipstream_rouse(2);
    if (!work(all)) return 2;
    if (!comes_to(id, others)) return 3;
    if (count > 1) {
      sched_setaffinity(id, sizeof here, &here);
      if (!work(here)) return 4;
      sched_setaffinity(id, sizeof all, &all);
      if (!work(all)) return 5;
    }
  }
  cpu_set_t mine;
  sched_getaffinity(0, sizeof mine, &mine);
  return CPU_COUNT(&mine) == 1 ? 0 : 6;
}
"""


def arguments() -> tuple[torch.Tensor, ...]:
    args: tuple[torch.Tensor, ...] = LINEAR.build("cpu", tokens=200, inputs=256, outputs=1000)
    return args


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", ["same", "int8", "int4/32"])
@pytest.mark.parametrize("inputs", [256, 288])
def test_threads_change_no_bit(
    libraries: dict[str, KernelLibrary], dtype: torch.dtype, weight: str, inputs: int
) -> None:
    args = LINEAR.build(
        "cpu",
        tokens=37, inputs=inputs, outputs=999, dtype=dtype, weight=weight, has_bias=True,
    )  # fmt: skip
    for library in libraries.values():
        use_threads(1)
        expected = library.streamed_linear(*args)
        for count in (2, 3, 8):
            use_threads(count)
            assert torch.equal(library.streamed_linear(*args), expected)


def answer_of(program: str, folder: Path, *words: str) -> tuple[int, str]:
    """Of a program with the pool: what it returns, and what it prints."""
    source, executable = folder / "program.cpp", folder / "program"
    source.write_text(program)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-pthread", f"-I{SOURCES}"]
    command += [str(source), str(SOURCES / "runtime/pool.cpp"), "-o", str(executable)]
    subprocess.run(command, check=True)
    answer = subprocess.run(
        [executable, *words], capture_output=True, text=True, check=False, timeout=60
    )
    return answer.returncode, answer.stdout


def test_a_part_without_memory_fails_the_call_once_all_others_are_done(tmp_path: Path) -> None:
    assert answer_of(PARTS, tmp_path) == (0, "200 rounds\n")


def test_along_memory_each_part_is_done_once(tmp_path: Path) -> None:
    assert answer_of(ALONG, tmp_path) == (0, "400 rounds\n")


@linux_only
def test_who_is_roused_keeps_watch_for_a_moment(tmp_path: Path) -> None:
    """Small pieces of work are then worth being cut; without work the threads go back to sleep."""
    assert answer_of(WATCH, tmp_path) == (0, "1 800\n")


@linux_only
def test_who_is_roused_by_a_step_keeps_watch_until_its_end(tmp_path: Path) -> None:
    assert answer_of(STEP, tmp_path) == (0, "1\n")


@linux_only
@pytest.mark.parametrize("words", [[], ["somebody else decides"]])
def test_who_sleeps_does_not_wake_where_its_caller_runs(tmp_path: Path, words: list[str]) -> None:
    assert answer_of(PLACES, tmp_path, *words) == (0, "")


@linux_only
def test_who_meets_the_event_loop_again_and_again_leaves_its_cpu(library: KernelLibrary) -> None:
    places, where = Places(library.path), ctypes.CDLL(None).sched_getcpu
    allowed = os.sched_getaffinity(0)
    moves, elsewhere, afterwards = [], [], []

    def meet(cpu: int) -> None:
        for _ in range(30):
            os.sched_setaffinity(0, {cpu})
            places.loop_is_here()
            os.sched_setaffinity(0, allowed)
            asked = [places.leave_loop() for _ in range(3)]
            if asked == [False, False, True]:
                elsewhere.append(where() != cpu)
            moves.append(sum(asked))
            afterwards.append(os.sched_getaffinity(0))
            time.sleep(0.005)

    for cpu in sorted(allowed)[:2]:
        thread = threading.Thread(target=meet, args=(cpu,))
        thread.start()
        thread.join()
    assert max(moves) == 1
    assert afterwards == [allowed] * len(moves)
    # The system moves it as well, at times before it has met the loop three times.
    assert sum(moves) > len(moves) / 2
    assert len(allowed) == 1 or sum(elsewhere) > len(elsewhere) / 2


@linux_only
def test_who_has_left_the_event_loops_cpu_stays_for_a_while(library: KernelLibrary) -> None:
    places, moves, seconds = Places(library.path), [], []

    def meet() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        places.loop_is_here()
        before = time.monotonic()
        moves.append(sum(places.leave_loop() for _ in range(100)))
        seconds.append(time.monotonic() - before)

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()
    assert 1 <= moves[0] <= 1 + seconds[0] / 0.002


@linux_only
def test_there_are_as_many_as_were_asked_for_and_they_sleep(fresh: KernelLibrary) -> None:
    args, before = arguments(), set(os.listdir(TASKS))
    for count in (1, 2, 4, 3):
        use_threads(count)
        for _ in range(20):
            fresh.streamed_linear(*args)
        assert len(set(os.listdir(TASKS)) - before) == (3 if count == 3 else count - 1)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1


@linux_only
def test_signals_are_not_theirs(fresh: KernelLibrary) -> None:
    before = set(os.listdir(TASKS))
    use_threads(5)
    fresh.streamed_linear(*arguments())
    started = set(os.listdir(TASKS)) - before
    assert len(started) == 4
    for task in started:
        status = (TASKS / task / "status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("SigBlk")]
        assert int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1


def test_many_callers_at_once(library: KernelLibrary) -> None:
    args = arguments()
    expected = library.streamed_linear(*args)
    wrong = []

    def call() -> None:
        use_threads(3)
        wrong.extend(
            n for n in range(50) if not torch.equal(library.streamed_linear(*args), expected)
        )

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@linux_only
def test_a_child_has_threads_of_its_own(library: KernelLibrary) -> None:
    program = f"""
import os, sys
import torch
from src.ops import LINEAR
from src.ops.runtime.calls import use_threads
from src.ops.runtime.kernel_library import KernelLibrary
torch.set_num_threads(1)
use_threads(3)
library = KernelLibrary({str(library.path)!r})
library.assume_wake_cost(0.01)
args = LINEAR.build("cpu", tokens=200, inputs=256, outputs=1000)
expected = library.streamed_linear(*args)
child = os.fork()
for _ in range(20):
    assert torch.equal(library.streamed_linear(*args), expected)
if child == 0:
    os._exit(0 if len(os.listdir("/proc/self/task")) == 3 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_program_for_the_thread_sanitizer_follows_the_interface() -> None:
    """It names the fields of `abi.h` by position, and only a session of its own runs it."""
    program = ROOT / "tests/ops/threads_under_tsan.cpp"
    command = ["c++", "-std=c++17", "-Wno-psabi", "-fsyntax-only", f"-I{SOURCES}"]
    subprocess.run([*command, str(program)], check=True)
