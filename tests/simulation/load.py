"""Requests and their times, drawn from a seed: mixed lengths, shared prefixes, some cancelled in each phase."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from weakref import WeakSet

from kvmesh.core import SamplingParams
from services.frontend.pipeline.request import Request
from services.simulation.frontend import MODEL
from services.simulation.ledger import PlannedCancel, RequestPhase
from tests.simulation.scripted_mesh import ScriptedMesh

PLAYING: WeakSet[ScriptedMesh] = WeakSet()
"""Meshes whose load has not ended."""
CANCEL_PHASES = (RequestPhase.ASKING, RequestPhase.PREFILLING, RequestPhase.SUBMITTED, RequestPhase.DECODING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request of the load."""

    at_s: float
    request: Request
    cancel: PlannedCancel | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Poisson arrivals. A prompt is the beginning of one of `families` long texts, followed by a tail of its own.

    `hurried_fraction` of the requests have a timeout shorter than most answers take. `has_whole`: every second request is not streamed.
    """

    rate_per_s: float = 40.0
    families: int = 12
    prefix_tokens_max: int = 400
    tail_tokens_max: int = 160
    output_tokens_max: int = 80
    cancelled_fraction: float = 0.15
    hurried_fraction: float = 0.0
    has_whole: bool = False


LOADS = {
    "calm": LoadShape(),
    "hurried": LoadShape(hurried_fraction=0.5, cancelled_fraction=0.3),
    "dense": LoadShape(rate_per_s=120.0, cancelled_fraction=0.3),
    "halves": LoadShape(has_whole=True, cancelled_fraction=0.1),
    "long": LoadShape(has_whole=True, cancelled_fraction=0.0, rate_per_s=25.0, output_tokens_max=400),
    "single": LoadShape(rate_per_s=80.0, output_tokens_max=1, hurried_fraction=0.1),
}
HURRIES_S = (0.001, 0.01, 0.03, 0.1, 0.2)


def plan_load(generator: Random, count: int, shape: LoadShape) -> Sequence[Planned]:
    """Returns `count` requests in the order of their times."""
    families = [generator.randbytes(shape.prefix_tokens_max) for _ in range(shape.families)]
    planned: list[Planned] = []
    at_s = 0.0
    for number in range(count):
        at_s += generator.expovariate(shape.rate_per_s)
        is_cancelled = generator.random() < shape.cancelled_fraction
        planned.append(
            Planned(
                at_s=at_s,
                request=_request(generator, f"r{number}", families, shape=shape),
                cancel=_cancel(generator) if is_cancelled else None,
                is_whole=shape.has_whole and number % 2 == 1,
            )
        )
    return planned


async def play_load(mesh: ScriptedMesh, load: Sequence[Planned]) -> None:
    """Starts each request at its time, counted from now, and waits for all to end."""
    began_s = mesh.now_s
    PLAYING.add(mesh)
    for planned in load:
        await mesh.world.clock.sleep(began_s + planned.at_s - mesh.now_s)
        mesh.begin(planned.request, planned.cancel, is_whole=planned.is_whole)
    await asyncio.wait([mesh._requests[planned.request.request_id] for planned in load])
    PLAYING.discard(mesh)


def _cancel(generator: Random) -> PlannedCancel:
    # A step, a message or a transfer takes a few milliseconds: the cancel meets a request that is in the phase, or just past it.
    return PlannedCancel(
        phase=generator.choice(CANCEL_PHASES), after_s=generator.choice((0.0, generator.expovariate(100.0)))
    )


def _stops(generator: Random) -> Sequence[str]:
    """Returns stop strings short enough to occur by chance in answers of random bytes."""
    letters = [chr(generator.randint(33, 126)) for _ in range(3)]
    return letters[0], "".join(letters[1:])


def _bias(generator: Random) -> Sequence[tuple[int, float]]:
    return tuple((generator.randint(32, 255), generator.uniform(1.0, 9.0)) for _ in range(4))


def _request(generator: Random, request_id: str, families: Sequence[bytes], *, shape: LoadShape) -> Request:
    prefix = generator.choice(families)[: generator.randint(0, shape.prefix_tokens_max)]
    token_ids = list(prefix + generator.randbytes(generator.randint(1, shape.tail_tokens_max)))
    is_text = generator.random() < 0.2
    has_seed = generator.random() < 0.3
    return Request(
        request_id=request_id,
        model=MODEL,
        prompt="".join(chr(32 + token % 90) for token in token_ids) if is_text else token_ids,
        sampling=SamplingParams(
            max_tokens=(max_tokens := generator.randint(1, shape.output_tokens_max)),
            temperature=1.0 if has_seed else 0.0,
            seed=generator.getrandbits(40) if has_seed else None,
            ignore_eos=generator.random() < 0.5,
            logprobs=2 if generator.random() < 0.1 else None,
            min_tokens=generator.randint(0, max_tokens) if generator.random() < 0.2 else None,
            stop=_stops(generator) if generator.random() < 0.15 else (),
            logit_bias=_bias(generator) if generator.random() < 0.1 else (),
        ),
        choices=2 if generator.random() < 0.05 else 1,
        cache_salt="tenant" if generator.random() < 0.1 else "",
        priority=generator.choice((0, 0, 0, 1, -1)),
        timeout_s=generator.choice(HURRIES_S) if generator.random() < shape.hurried_fraction else None,
    )
