"""Makes the requests of a schedule."""

from random import Random

from kvmesh.core import SamplingParams
from services.frontend.pipeline.request import Request
from services.simulation.frontend import MODEL
from services.simulation.ledger import Phase
from services.simulation.load import Cancel
from services.simulation.schedule import RequestPlan
from services.simulation.tools import tool_constraint

FAMILY_TOKENS = 1024


def make_request(plan: RequestPlan, seed: int) -> Request:
    """`seed` is that of the schedule: it makes the texts of the families."""
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


def make_cancel(plan: RequestPlan) -> Cancel | None:
    """When the client leaves, if it does."""
    if plan.cancel_after_s is None:
        return None
    phase = Phase[plan.cancel_phase] if plan.cancel_phase else Phase.WAITING
    return Cancel(phase=phase, after_s=plan.cancel_after_s)
