"""Answers of one token, which a prefill worker gives itself: an ordinary generation, and nothing is left of it but cached blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core import Role, TokenLogprob
from kvmesh.engines.base import EngineFinish, Leg
from kvmesh.rpc.clients import LegFinish, LegOutput
from kvmesh.worker.direct import DirectCalls, raise_failure
from kvmesh.worker.worker import Submission, Worker


@dataclass(slots=True)
class Gathered:
    """What an engine has given of an answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] | None = None

    def output(self, finish: EngineFinish) -> LegOutput:
        """The whole of it."""
        return LegOutput(
            token_ids=self.token_ids,
            finish=LegFinish(reason=finish.reason, usage=finish.usage, stop_token_id=finish.stop_token_id),
            logprobs=self.logprobs or None,
            prompt_logprobs=self.prompt_logprobs,
        )


def answers_single_tokens(worker: Worker) -> bool:
    """Whether the engine can generate in this role; one that only ever hands out cannot."""
    return Role.DECODE in worker.description.capabilities.roles


def leg_for(worker: Worker, *, wants_output: bool) -> Leg:
    """What the engine is asked for: the prompt, or the whole answer."""
    return Leg.DECODE if wants_output and answers_single_tokens(worker) else Leg.PREFILL


async def run_whole(direct: DirectCalls, submission: Submission) -> tuple[EngineFinish, Gathered]:
    """One leg to its end, and what it gave. A failure is raised."""
    gathered = Gathered()
    stream = direct.stream(submission)
    try:
        async for step in stream:
            gathered.token_ids += step.token_ids
            gathered.logprobs += step.logprobs or ()
            gathered.prompt_logprobs = gathered.prompt_logprobs or step.prompt_logprobs
            if step.finish is not None:
                return raise_failure(step.finish), gathered
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    raise AssertionError("a stream ends with a finish or a failure")
