"""What threads gain in a step, and why no more: their balance, and the time outside of what they share.

    python -m benchmarks.studies.threads [--models plain20] [--batches 128] [--threads 1 2] [--json FILE]

BPT-CNN shows the time of a run by threads (Fig. 14); their balance and what they save are figures of ours. A step is a
row of calls that the threads share; between two of them one thread decides what comes next. Balance is the time that
the least busy thread works inside calls, divided by that of the busiest. A thread that waits for a task of a spectral
pass counts as working. The critical path of a step is what is outside of calls, and each call's busiest thread. `waits`
is the rest of the step, in which that path waits until threads take a call up and all have ended it. A graph of tasks
over the whole step, without ends of calls and with nothing between them, could at best share out all work evenly: `at
best` is how long that would take, divided by what a step takes now.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import LR, Configuration, Results, configurations, in_fresh_process, parser, start
from benchmarks.runs import load, markdown
from daskcnn.arrays import Pool, single_threaded_blas
from daskcnn.nn import StepPace

RESULTS = Path(__file__).parent / "results" / "threads.json"
SHARES = ("saving", "balance", "outside", "waits", "at_best")
STEPS = 5
"""Steps before the first that counts."""


class Busy:
    """Seconds inside the pool's calls, of each thread's work there, and of the busiest one's in each call."""

    def __init__(self, threads: int) -> None:
        self.inside, self.works, self.longest = 0.0, [0.0] * threads, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap what the pool does together."""
        together = Pool._together

        def watched(pool: Pool, work: Callable[[], None], at_most: int) -> None:
            taken = [0.0]

            def timed() -> None:
                begun = time.perf_counter()
                work()
                taken.append(time.perf_counter() - begun)
                self.works[pool.thread] += taken[-1]

            begun = time.perf_counter()
            together(pool, timed, at_most)
            self.inside += time.perf_counter() - begun
            self.longest += max(taken)

        Pool._together = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            Pool._together = together  # type: ignore[method-assign]


def measure(c: Configuration, seconds: float) -> dict[str, Any]:
    """Median seconds of a step; over all steps the seconds in calls and of each thread's work."""
    with single_threaded_blas():
        replica, batch = start(c)
        for _ in range(STEPS):
            replica.step(batch, StepPace(LR))
        busy, taken = Busy(c.threads), list[float]()
        with busy.watching():
            begun = time.perf_counter()
            while not taken or time.perf_counter() - begun < seconds:
                at = time.perf_counter()
                replica.step(batch, StepPace(LR))
                taken.append(time.perf_counter() - at)
    whole = sum(taken)
    outside = whole - busy.inside
    best = (outside + sum(busy.works)) / c.threads
    return {
        "seconds": median(taken),
        "outside": outside / whole,
        "balance": min(busy.works) / max(busy.works) if busy.inside else 1.0,
        "waits": (busy.inside - busy.longest) / whole,
        "at_best": best / whole if busy.inside else 1.0,
    }


def tables() -> Iterator[str]:
    """Yield that of the kept results: steps on several threads."""
    found = [each for each in load(RESULTS)["results"] if each["threads"] > 1]
    head = ["network, batch", "threads", *SHARES]
    rows = [
        [f"`{each['model']}`, {each['batch']}", str(each["threads"]), *(f"{each[name]:.2f}" for name in SHARES)]
        for each in found
    ]
    yield markdown(head, rows, left=[0]).replace("at_best", "at best")


def main() -> int:
    """Print a line for each configuration."""
    options = parser(__doc__, seconds=6.0, what="a configuration").parse_args()
    results, alone = Results(options.json), dict[tuple[str, int], float]()
    print("network         batch threads    ms a step   saving   balance   outside     waits   at best")
    for c in configurations(options, no_lrn=False):
        figures = in_fresh_process(measure, c, options.seconds)
        one = alone.setdefault((c.model, c.batch), figures["seconds"] if c.threads == 1 else float("nan"))
        figures["saving"] = 1 - figures["seconds"] / one
        shares = "".join(f"{figures[name]:10.2f}" for name in SHARES)
        print(f"{c}{figures['seconds'] * 1e3:13.1f}{shares}", flush=True)
        results.add(asdict(c), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
