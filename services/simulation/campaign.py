"""Plays many seeds, on all cores."""

import gc
import logging
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import active_children, get_context

from services.simulation.draw import draw_schedule
from services.simulation.play import Outcome, play
from services.simulation.schedule import Schedule, Topology

AHEAD_PER_JOB = 2
INTERRUPT_POLL_S = 0.1
GC_OBJECTS = 200_000
"""New objects between two collections. A run makes few cycles, and collecting as often as usual costs a tenth of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is drawn for each seed. `topology` None: drawn too."""

    requests: int = 50
    faults: int = 6
    topology: Topology | None = None
    is_survivable: bool = True

    def schedule(self, seed: int) -> Schedule:
        """Returns the schedule of a seed."""
        return draw_schedule(
            seed, requests=self.requests, topology=self.topology, faults=self.faults, is_survivable=self.is_survivable
        )


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the runs."""

    seeds: int = 0
    requests: int = 0
    faults: int = 0
    continued: int = 0
    tokens: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Counts one run."""
        self.seeds += 1
        self.requests += outcome.requests
        self.faults += outcome.faults
        self.continued += outcome.continued
        self.tokens += outcome.tokens
        self.messages += outcome.messages
        self.virtual_s += outcome.virtual_s
        self.cpu_s += outcome.cpu_s
        self.outcomes.update(outcome.outcomes)

    def lines(self) -> Sequence[str]:
        """As text for people."""
        per_cpu_s = self.seeds / self.cpu_s if self.cpu_s else 0.0
        return (
            f"seeds     {self.seeds}, {self.faults} faults, {per_cpu_s:.2f} seeds per CPU-second",
            f"requests  {self.requests}: {dict(sorted(self.outcomes.items()))}",
            f"          {self.continued} continued on another worker, {self.tokens} tokens, {self.messages} messages",
            f"time      {self.virtual_s:.0f} s virtual, {self.cpu_s:.0f} s of CPU time",
        )


def run_seeds(campaign: Campaign, seeds: Sequence[int], *, jobs: int) -> Generator[Outcome, None, None]:
    """Plays the seeds and yields the outcomes as they come, without their lines. Ends its processes when it is closed, and at Ctrl-C.

    Call it on the main thread, because it handles SIGINT: an exception while the pool starts processes would leave some running. Blocking
    the signal would not help, because the kernel may deliver it to another thread, such as one of gRPC's.
    """
    if jobs <= 1:
        for seed in seeds:
            yield _play_seed(campaign, seed)
        return
    interrupts: list[int] = []
    others = active_children()
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
            try:
                yield from _in_parallel(
                    partial(_submit, pool, campaign), seeds, AHEAD_PER_JOB * jobs, interrupts=interrupts
                )
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in active_children():
                    if process not in others:
                        process.terminate()
    finally:
        signal.signal(signal.SIGINT, before)


def _submit(pool: ProcessPoolExecutor, campaign: Campaign, seed: int) -> Future[Outcome]:
    """May start a process, which inherits the blocked signal: Ctrl-C is for the process that waits for the seeds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_play_seed, campaign, seed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_parallel(
    submit: Callable[[int], Future[Outcome]], seeds: Sequence[int], ahead: int, *, interrupts: Sequence[int]
) -> Iterator[Outcome]:
    rest = iter(seeds)
    running: set[Future[Outcome]] = set()
    while True:
        running.update(submit(seed) for _, seed in zip(range(ahead - len(running)), rest, strict=False))
        if not running:
            return
        done, running = wait(running, timeout=INTERRUPT_POLL_S, return_when=FIRST_COMPLETED)
        if interrupts:
            raise KeyboardInterrupt
        for future in done:
            yield future.result()


def _quiet() -> None:
    """The services' logs of deliberate faults say nothing new."""
    logging.disable(logging.CRITICAL)
    gc.set_threshold(GC_OBJECTS, 20, 20)


def _play_seed(campaign: Campaign, seed: int) -> Outcome:
    return replace(play(campaign.schedule(seed)), lines=())
