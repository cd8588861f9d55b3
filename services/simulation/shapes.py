"""What a schedule asks for: the settings of its mesh, and its requests.

Leases are longer than a whole run, so that what a lease would heal later is seen as a leak. Pauses of breakers and graces are short, so that
a run needs little time to settle.
"""

from random import Random

from kvmesh.core import SamplingParams
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings
from services.router.health.breaker import BreakerSettings
from services.router.settings import RouterSettings
from services.simulation.draw import ADAPTERS
from services.simulation.frontend import MODEL
from services.simulation.ledger import PlannedCancel, RequestPhase
from services.simulation.mesh import MeshShape, default_engine
from services.simulation.schedule import RequestPlan, Topology
from services.simulation.tools import tool_constraint

LEASE_S = 60.0
CANDIDATES = 2
BREAKER = BreakerSettings(pause_min_s=0.5, pause_max_s=3.0)
FAMILY_TOKENS = 1024


def shape_of(topology: Topology) -> MeshShape:
    """Returns the mesh of a schedule."""
    tight = (
        {"kv_blocks": 130, "running_requests_max": 16, "step_tokens_max": 128, "reserved_output_tokens": 16}
        if topology.is_tight
        else {}
    )
    router = (
        RouterSettings(
            requests_per_decode_max=6, prompt_tokens_per_prefill_max=1024, breaker=BREAKER, reservation_grace_s=3.0
        )
        if topology.is_crowded
        else RouterSettings(breaker=BREAKER, reservation_grace_s=3.0)
    )
    return MeshShape(
        prefill=topology.prefill,
        decode=topology.decode,
        routers=topology.routers,
        frontends=topology.frontends,
        candidates=CANDIDATES,
        kv_groups=topology.kv_groups,
        adapters=ADAPTERS,
        engine=default_engine(
            handoff="rendezvous" if topology.rendezvous else "sequential",
            decode_tokens_per_step=topology.decode_tokens_per_step,
            eos_after_tokens=max(2, topology.output_tokens_max // 2),
            lease_s=LEASE_S,
            pull_timeout_s=3.0,
            **tight,
        ),
        router=router,
        pipeline=PipelineSettings(first_token_timeout_s=60.0, idle_timeout_s=20.0),
    )


def make_request(plan: RequestPlan, seed: int) -> Request:
    """`seed` is the schedule's seed: the texts of the prompt families derive from it."""
    family = Random(f"{seed}/family/{plan.family}").randbytes(FAMILY_TOKENS)
    token_ids = list(family[: plan.prefix_tokens] + Random(plan.tail_seed).randbytes(plan.tail_tokens))
    return Request(
        request_id=plan.request_id,
        model=MODEL,
        prompt="".join(chr(32 + token % 90) for token in token_ids) if plan.is_text else token_ids,
        sampling=SamplingParams(
            max_tokens=plan.max_tokens,
            min_tokens=plan.min_tokens,
            temperature=1.0 if plan.seed is not None else 0.0,
            seed=plan.seed,
            ignore_eos=plan.ignore_eos,
            logprobs=plan.logprobs,
            prompt_logprobs=plan.prompt_logprobs,
            stop=plan.stop,
            logit_bias=plan.logit_bias,
            constraint=tool_constraint() if plan.has_tools else None,
        ),
        choices=plan.choices,
        adapter=plan.adapter,
        cache_salt=plan.cache_salt,
        priority=plan.priority,
        session_id=plan.session_id,
        timeout_s=plan.timeout_s,
    )


def make_cancel(plan: RequestPlan) -> PlannedCancel | None:
    """When the client leaves, if it does."""
    if plan.cancel_after_s is None:
        return None
    phase = RequestPhase[plan.cancel_phase] if plan.cancel_phase else RequestPhase.WAITING
    return PlannedCancel(phase=phase, after_s=plan.cancel_after_s)
