from enum import IntEnum
from typing import Any

# Origin: disaggregated_params.py, 01009a33a704c61e2c183c40514d7fb59159ab09.
class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1

# Origin: disaggregated_params.py, 01009a33a704c61e2c183c40514d7fb59159ab09; `ctx_usage`: reference, section 3.
class DisaggregatedParams:
    request_type: str | None
    first_gen_tokens: list[int] | None
    first_gen_log_probs: list[Any] | None
    ctx_request_id: int | None
    opaque_state: bytes | None
    draft_tokens: list[int] | None
    disagg_request_id: int | None
    ctx_dp_rank: int | None
    ctx_info_endpoint: str | None
    schedule_style: DisaggScheduleStyle | None
    def __init__(
        self,
        *,
        request_type: str | None = None,
        first_gen_tokens: list[int] | None = None,
        first_gen_log_probs: list[Any] | None = None,
        ctx_request_id: int | None = None,
        opaque_state: bytes | None = None,
        draft_tokens: list[int] | None = None,
        disagg_request_id: int | None = None,
        ctx_dp_rank: int | None = None,
        ctx_info_endpoint: str | None = None,
        schedule_style: DisaggScheduleStyle | None = None,
    ) -> None: ...
