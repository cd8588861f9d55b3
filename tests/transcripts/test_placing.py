"""A transcript of placements, to review as a document: `placing.txt` beside this file."""

from pathlib import Path

from kvmesh.core import KvBatch, KvRemoved, Placement, Report, ReportKind
from kvmesh.errors import MeshError
from tests.unit.router_fleets import ask, core, join, store_blocks

TRANSCRIPT = Path(__file__).with_name("placing.txt")
LISTS = {"features", "adapters"}


class TranscriptRouter:
    """A router core that executes the lines of the transcript."""

    def __init__(self) -> None:
        self.router = core()
        self.numbers: dict[str, int] = {}
        self.now = 0.0

    def execute(self, line: str) -> list[str]:
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        return getattr(self, verb)(*names, **options) or []

    def worker(self, name: str, *, role: str, **options) -> None:
        join(self.router, name, role, **{k: v.split(",") if k in LISTS else v for k, v in options.items()})

    def ask(self, name: str, *, blocks: str, features: str = "", exclude: str = "", **options) -> list[str]:
        hashes = [int(block) for block in blocks.split(",")]
        what = ask(
            name,
            hashes,
            required_features=features.split(",") if features else (),
            excluded_worker_ids=exclude.split(",") if exclude else (),
            **options,
        )
        self.numbers[name] = len(self.numbers) + 1
        try:
            placement = self.router.ask("frontend", self.numbers[name], what, now=self.now, wall=0.0)
        except MeshError as error:
            return [refusal(error)]
        return [sentence(placement, what.prompt_tokens)]

    def report(self, name: str, kind: str) -> None:
        """Reports a tenth of a second after the latest ask."""
        self.now += 0.1
        assert self.router.report("frontend", self.numbers[name], Report(kind=ReportKind(kind), elapsed_s=0.1))

    def stored(self, name: str, blocks: str) -> None:
        store_blocks(self.router.fleet.workers[name], [int(block) for block in blocks.split(",")])

    def removed(self, name: str, blocks: str) -> None:
        feed = self.router.fleet.workers[name].feed
        event = KvRemoved(block_hashes=tuple(int(block) for block in blocks.split(",")))
        assert feed.apply(KvBatch(epoch=1, sequence=feed.resume_at[1] + 1, events=(event,)))

    def broken(self, name: str) -> None:
        self.router.fleet.disconnected(self.router.fleet.workers[name], "unreachable")

    def standing(self, name: str) -> None:
        self.router.fleet.connected(self.router.fleet.workers[name])

    def gone(self, name: str) -> None:
        self.router.fleet.unregister(name)

    def draining(self, name: str) -> None:
        self.mark(name, is_draining=True)

    def critical(self, name: str) -> None:
        self.mark(name, is_critical=True)

    def mark(self, name: str, **marks: bool) -> None:
        worker = self.router.fleet.workers[name]
        state = {"is_critical": False, "is_draining": False} | marks
        self.router.fleet.register(name, address=worker.address, role=worker.role, labels={}, **state)

    def load(self) -> list[str]:
        return [
            f"{target.ref.worker_id} requests={target.requests_in_flight} "
            f"prompt_tokens={target.prompt_tokens_in_flight} kv_blocks={target.kv_blocks_in_flight}"
            for target in self.router.fleet.targets()
        ]

    def exclusions(self) -> list[str]:
        fleet = self.router.fleet
        return [
            f"{name} {worker.excluded_by or ('incompatible' if fleet.is_incompatible(worker) else '')}".strip()
            for name, worker in sorted(fleet.workers.items())
        ]


def sentence(placement: Placement, prompt_tokens: int) -> str:
    where = f"{placement.decode.worker_id} alone"
    if placement.prefill is not None:
        where = f"{placement.prefill.worker_id} -> {placement.decode.worker_id} {placement.handoff}"
    cached = f"{placement.cached_tokens} of {prompt_tokens} tokens cached"
    return f"{where}, {cached}, {1000 * placement.expected_ttft_s:.1f} ms: {' '.join(placement.reasons)}"


def refusal(error: MeshError) -> str:
    wait = f", retry after {error.retry_after_s:g} s" if error.retry_after_s else ""
    detail = f": {error.message}" if "engines here" in error.message else ""
    return f"refused {type(error).__name__} {error.reason}{wait}{detail}"


def test_placements_match_the_transcript():
    """The lines after each event are exactly the router's decisions."""
    expected = TRANSCRIPT.read_text().splitlines()
    router, actual = TranscriptRouter(), []
    for line in expected:
        if line.startswith(">"):
            actual += [line, *router.execute(line[1:])]
        elif line.startswith("#") or not line:
            actual.append(line)
    assert actual == expected
