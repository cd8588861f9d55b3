"""The legs of one placement of a request. Pure."""

from dataclasses import replace

from kvmesh.checks import is_whole_number
from kvmesh.core import KvHandle, KvReader, Leg, LegTask, Rendezvous, WorkerRef
from kvmesh.errors import InternalError
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.prepare import Prepared


class LegFactory:
    """Makes the legs of the choices. A choice continues after the tokens that it has."""

    def __init__(self, prepared: Prepared, state: AttemptState) -> None:
        self._prepared = prepared
        self._state = state

    def scores_prompt(self, i: int) -> bool:
        """Returns whether a choice still needs the prompt's log-probabilities."""
        return self._prepared.generation.sampling.prompt_logprobs is not None and not self._state.choices[i].has_prompt

    def is_single_token(self) -> bool:
        """Returns whether each choice needs exactly one more token."""
        max_tokens = self._prepared.generation.sampling.max_tokens
        return all(max_tokens == choice.tokens + 1 for choice in self._state.choices.values())

    def make(
        self,
        i: int,
        task: LegTask,
        worker: WorkerRef | None,
        *,
        handle: KvHandle | None = None,
        rendezvous: Rendezvous | None = None,
        is_hedge: bool = False,
    ) -> Leg:
        """Returns the leg of choice `i` for `worker`, whose rank it runs on. None: the worker has no ranks.

        `is_hedge`: a second prefill leg runs for the same choice.
        """
        leg_id = f"{self._prepared.request.request_id}-{i}{self._state.suffix}"
        reader = None
        if task is LegTask.PREFILL:
            # The handle is sealed for the leg of the same choice.
            reader = KvReader(worker_id=self._state.placement.decode.worker_id, leg_id=leg_id)
            leg_id += "ph" if is_hedge else "p"
        choice = self._state.choices[i]
        generation = self._prepared.generation_of(i, choice.emitted_token_ids)
        if worker is not None and worker.data_parallel_rank is not None:
            generation = replace(generation, data_parallel_rank=worker.data_parallel_rank)
        # With a rendezvous the prefill leg scores the prompt.
        is_scored = choice.has_prompt or (rendezvous is not None and task is LegTask.GENERATE)
        if is_scored and generation.sampling.prompt_logprobs is not None:
            generation = replace(generation, sampling=replace(generation.sampling, prompt_logprobs=None))
        return Leg(
            leg_id=leg_id,
            task=task,
            generation=generation,
            handle=handle,
            rendezvous=rendezvous,
            reader=reader,
        )


def rendezvous_at(address: str, prefill: WorkerRef, *, room: int) -> Rendezvous:
    """Returns where the two legs of a choice meet. Raises InternalError for an address that is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not is_whole_number(port):
        raise InternalError(f"the router returned no rendezvous address for {prefill.worker_id}")
    return Rendezvous(
        host=host.strip("[]"), port=int(port), room=room, prefill_data_parallel_rank=prefill.data_parallel_rank
    )
