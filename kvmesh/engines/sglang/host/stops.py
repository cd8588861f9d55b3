"""Stop tokens of requests that ignore the end token: SGLang would ignore the request's own stop tokens, too."""

from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req


class MeshRequest(Req):  # type: ignore[misc]
    """A request whose `stop_token_ids` end it, whatever `ignore_eos` is."""

    def _check_token_based_finish(self, new_accepted_tokens: Sequence[int]) -> bool:
        stops = self.sampling_params.stop_token_ids
        if not (stops and self.sampling_params.ignore_eos):
            return bool(super()._check_token_based_finish(new_accepted_tokens))
        for position, token_id in enumerate(new_accepted_tokens, len(self.output_ids) - len(new_accepted_tokens)):
            if token_id in stops:
                self.finished_reason = FINISH_MATCHED_TOKEN(matched=token_id)
                self.finished_len = position + 1
                return True
        return False
