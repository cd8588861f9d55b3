"""Draws a schedule from a seed."""

from dataclasses import replace
from random import Random

from services.simulation.draw_faults import draw_faults
from services.simulation.ledger import RequestPhase
from services.simulation.schedule import RequestPlan, Schedule, Topology

FAMILIES = 8
PREFIX_TOKENS_MAX = 400
TAIL_TOKENS_MAX = 160
CANCELLED = 0.15
CANCEL_PHASES = ("ASKING", "PREFILLING", "SUBMITTED", "DECODING")
HURRIES_S = (0.001, 0.01, 0.03, 0.1, 0.2)
RATES_PER_S = (10.0, 20.0, 40.0)
BURST_PER_S = 400.0
WITH_TOOLS = 0.08
CALL_TOKENS_MAX = 150
ADAPTERS = ("red", "blue")
assert set(CANCEL_PHASES) <= {phase.name for phase in RequestPhase}


def draw_schedule(
    seed: int, *, requests: int, topology: Topology | None = None, faults: int = 6, is_survivable: bool = True
) -> Schedule:
    """`topology` None: drawn too.

    `faults`: their mean number. Each part has its own random generator, so that changing one part does not change the others.
    """
    shape = topology or draw_topology(Random(f"{seed}/topology"))
    plans = _draw_requests(Random(f"{seed}/requests"), requests, shape)
    drawn = draw_faults(
        Random(f"{seed}/faults"), shape, faults, over_s=plans[-1].at_s if plans else 1.0, is_survivable=is_survivable
    )
    return Schedule(seed=seed, topology=shape, requests=tuple(plans), faults=tuple(drawn), is_survivable=is_survivable)


def draw_topology(generator: Random) -> Topology:
    """5 to 14 processes."""
    rendezvous = generator.random() < 0.25
    kv_groups = 2 if generator.random() < 0.15 else 1
    prefill = generator.choice((2, 2, 3, 3, 4)) if rendezvous else generator.choice((0, 1, 2, 2, 3, 4))
    return Topology(
        prefill=max(prefill, 2 * kv_groups) if kv_groups > 1 else prefill,
        decode=generator.choice((4, 5)) if kv_groups > 1 else generator.choice((2, 2, 3, 3, 4)),
        routers=generator.choice((1, 2, 2, 3)),
        frontends=generator.choice((1, 2, 2, 3)),
        rendezvous=rendezvous,
        is_tight=generator.random() < 0.25,
        is_crowded=generator.random() < 0.2,
        kv_groups=kv_groups,
        decode_tokens_per_step=3 if generator.random() < 0.15 else 1,
        output_tokens_max=generator.choice((1, 40, 80, 120, 200)),
    )


def _draw_requests(generator: Random, count: int, topology: Topology) -> list[RequestPlan]:
    rate_per_s = generator.choice(RATES_PER_S)
    burst = _burst(generator, count)
    plans: list[RequestPlan] = []
    at_s = 0.0
    for number in range(count):
        at_s += generator.expovariate(BURST_PER_S if number in burst else rate_per_s)
        plans.append(_draw_request(generator, f"r{number}", round(at_s, 6), topology=topology))
    return plans


def _burst(generator: Random, count: int) -> range:
    """Overload: a part of the requests arrives almost simultaneously. Every third load has one."""
    if generator.random() > 1 / 3:
        return range(0)
    begin = generator.randrange(max(1, count))
    return range(begin, begin + count // 3)


def _draw_request(generator: Random, request_id: str, at_s: float, *, topology: Topology) -> RequestPlan:
    has_seed = generator.random() < 0.3
    max_tokens = generator.randint(1, topology.output_tokens_max)
    phase, after_s = _draw_cancel(generator)
    plan = RequestPlan(
        request_id=request_id,
        at_s=at_s,
        frontend=generator.randrange(topology.frontends),
        family=generator.randrange(FAMILIES),
        prefix_tokens=generator.randint(0, PREFIX_TOKENS_MAX),
        tail_seed=generator.getrandbits(32),
        tail_tokens=generator.randint(1, TAIL_TOKENS_MAX),
        is_text=generator.random() < 0.2,
        is_whole=generator.random() < 0.4,
        max_tokens=max_tokens,
        min_tokens=generator.randint(0, max_tokens) if generator.random() < 0.2 else None,
        seed=generator.getrandbits(40) if has_seed else None,
        ignore_eos=generator.random() < 0.5,
        logprobs=2 if generator.random() < 0.1 else None,
        prompt_logprobs=1 if generator.random() < 0.05 else None,
        stop=_draw_stops(generator) if generator.random() < 0.15 else (),
        logit_bias=_draw_bias(generator) if generator.random() < 0.1 else (),
        choices=generator.choice((2, 3)) if generator.random() < 0.1 else 1,
        cache_salt="tenant" if generator.random() < 0.1 else "",
        priority=generator.choice((0, 0, 0, 1, -1)),
        session_id=f"s{generator.randrange(5)}" if generator.random() < 0.25 else "",
        adapter=generator.choice(ADAPTERS) if generator.random() < 0.15 else "",
        timeout_s=generator.choice(HURRIES_S) if generator.random() < 0.05 else None,
        cancel_phase=phase,
        cancel_after_s=after_s,
    )
    # Engines of a rendezvous cannot continue a constrained answer (docs/operate/support-matrix.md).
    if generator.random() >= WITH_TOOLS or topology.rendezvous:
        return plan
    more = generator.randint(0, CALL_TOKENS_MAX) if topology.output_tokens_max > 1 else 0
    return replace(
        plan, has_tools=True, max_tokens=max_tokens + more, min_tokens=None, ignore_eos=False, stop=(), logit_bias=()
    )


def _draw_cancel(generator: Random) -> tuple[str, float | None]:
    """Draws when the client leaves.

    A few milliseconds after a phase are a step, a crossing or a transfer; or any moment of the request's life.
    """
    if generator.random() >= CANCELLED:
        return "", None
    if generator.random() < 0.5:
        return "", round(generator.expovariate(3.0), 6)
    return generator.choice(CANCEL_PHASES), generator.choice((0.0, round(generator.expovariate(100.0), 6)))


def _draw_stops(generator: Random) -> tuple[str, ...]:
    """Short enough to occur by chance in answers of random bytes."""
    letters = [chr(generator.randint(33, 126)) for _ in range(3)]
    return letters[0], "".join(letters[1:])


def _draw_bias(generator: Random) -> tuple[tuple[int, float], ...]:
    return tuple((generator.randint(32, 255), round(generator.uniform(1.0, 9.0), 3)) for _ in range(4))
