"""Collects what the scheduler's requests have produced, as one HostStep per scheduler step."""

from collections.abc import Sequence
from typing import Any

from kvmesh.engines.sglang.host.requests import leg_number
from kvmesh.engines.sglang.messages import Begun, Finished, HostLoad, HostStep, KvChange, Logprob


class Outputs:
    """The changes since the last `take`."""

    def __init__(self) -> None:
        self.preempted_total = 0
        self._clear()

    def _clear(self) -> None:
        self._numbers: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._begun: list[Begun] = []
        self._finished: list[Finished] = []
        self._logprobs: dict[int, list[Logprob]] = {}
        self._prompt_logprobs: dict[int, list[Logprob]] = {}
        self.kv_changes: list[KvChange] = []

    @property
    def is_empty(self) -> bool:
        return not (self._numbers or self._begun or self._finished or self.kv_changes)

    def take(self, load: HostLoad) -> HostStep:
        step = HostStep(
            load=load,
            numbers=self._numbers,
            counts=self._counts,
            token_ids=self._token_ids,
            begun=self._begun,
            finished=self._finished,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            kv_changes=self.kv_changes,
        )
        self._clear()
        return step

    def add(self, request: Any) -> None:
        """New tokens of a request, and its end. As SGLang's own output streamer it counts what was sent in the request."""
        if request.finished():
            if request.finished_output:
                # The overlapped scheduler passes a finished request twice.
                return
            request.finished_output = True
            if request.finished_len is None:
                request.finished_len = len(request.output_ids)
        number = leg_number(request.rid)
        sent, tokens = request.send_token_offset, request.output_ids_through_stop
        if sent == 0 and (len(tokens) or request.finished()):
            self._begun.append(Begun(number=number, cached_tokens=request.cached_tokens, queue_s=queue_s(request)))
        if len(tokens) > sent:
            self._numbers.append(number)
            self._counts.append(len(tokens) - sent)
            self._token_ids.extend(tokens[sent:])
            request.send_token_offset = len(tokens)
            if request.return_logprob:
                self._add_logprobs(number, request, sent=sent, end=len(tokens))
        if request.finished():
            self.preempted_total += request.retraction_count
            self._finished.append(finished(number, request.finished_reason.to_json()))

    def abort(self, rid: str, reason: dict[str, Any] | None) -> None:
        """The end of a request that was not running."""
        self._finished.append(finished(leg_number(rid), {"type": "abort", **(reason or {})}))

    def refuse(self, number: int, message: str) -> None:
        """The end of a request that SGLang does not accept."""
        self._finished.append(Finished(number=number, kind="abort", message=message, status=400))

    def add_embedding(self, request: Any) -> None:
        if request.finished() and not request.finished_output:
            request.finished_output = True
            number, reason = leg_number(request.rid), request.finished_reason.to_json()
            vector = None if reason["type"] == "abort" else to_list(request.embedding)
            self._begun.append(Begun(number=number, cached_tokens=request.cached_tokens, queue_s=queue_s(request)))
            self._finished.append(finished(number, reason, vector))

    def _add_logprobs(self, number: int, request: Any, *, sent: int, end: int) -> None:
        values = request.logprob
        self._logprobs[number] = logprobs(
            values.output_token_logprobs_val[sent:end],
            values.output_top_logprobs_val[sent:end],
            values.output_top_logprobs_idx[sent:end],
        )
        if not request.input_logprob_sent and values.input_token_logprobs_val is not None:
            request.input_logprob_sent = True
            if request.logprob_start_len == 0:
                # The first token has no probability.
                self._prompt_logprobs[number] = logprobs(
                    values.input_token_logprobs_val[1:],
                    (values.input_top_logprobs_val or ())[1:],
                    (values.input_top_logprobs_idx or ())[1:],
                )


def logprobs(chosen: Sequence[Any], top_values: Sequence[Any], top_ids: Sequence[Any]) -> list[Logprob]:
    """Returns one entry per token. The lists of alternatives are empty when none were asked for."""
    if not any(top_values):
        return [(float(value), ()) for value in chosen]
    return [
        (float(value), list(zip(ids or (), map(float, values or ()), strict=True)))
        for value, values, ids in zip(chosen, top_values, top_ids, strict=True)
    ]


def finished(number: int, reason: dict[str, Any], embedding: list[float] | None = None) -> Finished:
    matched = reason.get("matched")
    return Finished(
        number=number,
        kind=str(reason["type"]),
        matched=matched if isinstance(matched, int) else None,
        message=str(reason.get("message") or ""),
        status=int(reason.get("status_code") or 0),
        embedding=embedding,
    )


def queue_s(request: Any) -> float:
    """From the entry into the scheduler's queue to the first step that computed the prompt; 0: there was none."""
    stats = request.time_stats
    if not stats.wait_queue_entry_time or not stats.forward_entry_time:
        return 0.0
    return max(0.0, float(stats.forward_entry_time - stats.wait_queue_entry_time))


def to_list(vector: Any) -> list[float]:
    return [float(value) for value in (vector.tolist() if hasattr(vector, "tolist") else vector)]
