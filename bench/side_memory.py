"""Measures the memory (PSS) of every process after a tenth, a half and all of many short requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from bench.http_target import HttpTarget
from bench.loops import closed_loop
from bench.mesh import Served
from bench.processes import descendants, pss_mib
from bench.prompts import PromptShape, make_prompts, one_token_words
from bench.target import LoadRequest

SHARES = (0.1, 0.5, 1.0)
CONCURRENCY = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 1
BESIDE = ("planner", "up")
"""Processes that take no part in requests: the planner, and `kvmesh up` with the registry. Dynamo runs neither."""
COLUMNS = ("system", "engines", "process", "requests", *(f"MiB at {share:.0%}" for share in SHARES), "grown", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Memory per process at each of SHARES. Totals count a page that several processes share once."""

    system: str
    kind: str
    requests: int
    errors: int
    pss_mib: Mapping[str, Sequence[float]]

    def rows(self) -> list[list[str]]:
        """Returns one row per process, and sums: of the processes that serve requests, of the others if there are any, and of all.

        `grown` is the difference between the first and the last figure.
        """
        beside = [name for name in self.pss_mib if name in BESIDE]
        sums = {"serving": self._sum([name for name in self.pss_mib if name not in BESIDE])}
        if beside:
            sums[" + ".join(beside)] = self._sum(beside)
        everything = {**self.pss_mib, **sums, "all": self._sum(list(self.pss_mib))}
        return [
            [
                *(self.system, self.kind, name, str(self.requests), *(f"{mib:.0f}" for mib in sizes)),
                *(f"{sizes[-1] - sizes[0]:+.0f}", str(self.errors)),
            ]
            for name, sizes in everything.items()
        ]

    def _sum(self, names: Sequence[str]) -> list[float]:
        return [sum(sizes) for sizes in zip(*(self.pss_mib[name] for name in names), strict=True)]


async def measure_memory(served: Served, kind: str, *, requests: int, seed: int) -> MemoryResult:
    """Sends all requests, 32 in flight."""
    words = one_token_words(served.model_dir)
    prompts = make_prompts(PromptShape(tokens=PROMPT_TOKENS), seed=seed, words=words)
    load = (LoadRequest(prompt=prompt, output_tokens=OUTPUT_TOKENS) for prompt in prompts)
    target = HttpTarget(served.url, served.model, quick_acks=True)
    sizes: dict[str, list[float]] = {name: [] for name in (*served.watch, *served.beside)}
    sent = errors = 0
    try:
        for share in SHARES:
            count = round(requests * share) - sent
            results = await closed_loop(target, islice(load, count), CONCURRENCY)
            sent += count
            errors += sum(bool(result.error) for result in results)
            for name, pid in served.watch.items():
                sizes[name].append(sum(map(pss_mib, [pid, *descendants(pid)])))
            for name, pid in served.beside.items():
                sizes[name].append(pss_mib(pid))
    finally:
        await target.aclose()
    return MemoryResult(system=served.system, kind=kind, requests=sent, errors=errors, pss_mib=sizes)
