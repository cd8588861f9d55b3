"""The scenarios. All are closed loops with distinct prompts, so that no prompt hits a prefix cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.mesh import MeshKind

FLAT_OUT = MeshKind(name="factor 0", engine_argv=("--simulated-time-factor", "0"))
"""Engine steps take no time: all cost is kvmesh's."""

PACED_STEP_S = 0.006
PACED = MeshKind(
    name="paced 6 ms",
    engine_argv=(
        *("--simulated-time-factor", "1", "--simulated-profile-base-s", str(PACED_STEP_S)),
        *("--simulated-profile-per-prefill-token-s", "0", "--simulated-profile-per-decode-request-s", "0"),
    ),
)
"""Every step takes 6 ms, so each stream gets one token per 6 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load of `concurrency` requests in flight, each with exactly these numbers of prompt and output tokens."""

    protocol: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    quick_acks: bool = False
    """The client acknowledges each packet at once, which hides that a server lacks TCP_NODELAY."""
    rate_per_s: float = 0.0
    """Requests per second at random times (Poisson). 0: a closed loop of `concurrency` requests."""

    @property
    def name(self) -> str:
        """The label of the scenario's row."""
        client = f"{self.protocol} (quick ACKs)" if self.quick_acks else self.protocol
        if self.rate_per_s:
            return f"{client} {self.prompt_tokens}+{self.output_tokens} {self.rate_per_s:g}/s"
        return f"{client} {self.prompt_tokens}+{self.output_tokens} x{self.concurrency}"


def _rows(protocol: str, *shapes: tuple[int, int, Sequence[int]], quick_acks: bool = False) -> list[Scenario]:
    return [
        Scenario(
            protocol=protocol,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            quick_acks=quick_acks,
        )
        for prompt_tokens, output_tokens, concurrencies in shapes
        for concurrency in concurrencies
    ]


#                                 prompt output  in flight
SCENARIOS: Sequence[tuple[MeshKind, Sequence[Scenario]]] = (
    (
        FLAT_OUT,
        [
            *_rows("http", (512, 64, [1]), (128, 128, [1, 8, 32, 128]), (2000, 16, [1, 8, 32, 128])),
            *_rows("grpc", (512, 64, [1]), (128, 128, [32, 128]), (2000, 16, [32])),
        ],
    ),
    (PACED, [*_rows("http", (128, 128, [32, 128])), *_rows("grpc", (128, 128, [32]))]),
)
"""The first row's time to first token is the overhead of the mesh, because the engines take no time."""

SIDE_BY_SIDE: Mapping[str, Sequence[tuple[MeshKind, Sequence[Scenario]]]] = {
    "stream": (
        (FLAT_OUT, _rows("http", (128, 128, [32, 128]), quick_acks=True)),
        (PACED, _rows("http", (128, 128, [32, 128]), quick_acks=True)),
    ),
    "arrivals": ((PACED, [replace(*_rows("http", (128, 128, [32]), quick_acks=True), rate_per_s=36.0)]),),
    "prompt": ((FLAT_OUT, _rows("http", (2000, 16, [32]), (8000, 1, [32]), quick_acks=True)),),
    "first": ((FLAT_OUT, [*_rows("http", (512, 64, [1])), *_rows("http", (512, 64, [1]), quick_acks=True)]),),
}
"""Scenarios by part. The client uses quick acknowledgements, except in one row that says so."""

QUICK: Sequence[tuple[MeshKind, Sequence[Scenario]]] = (
    (FLAT_OUT, [*_rows("http", (64, 8, [1]), (128, 16, [8])), *_rows("grpc", (64, 8, [2]))]),
    (PACED, _rows("http", (64, 8, [8]))),
)
"""A smoke run: one row of each kind, in seconds. The figures mean nothing."""
