"""Settings of the placement cost. The formula is in docs/understand/routing-cost.md."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Coefficients of workers whose profile has none, until they are learned, and the weights of the terms.

    The defaults are those of an 8-billion-parameter model on one current datacentre GPU. After some requests they do not matter, since
    the coefficients of each worker are learned.
    """

    prefill_base_s: float = setting(0.004, "Seconds of a prefill that do not depend on its length.", min=0)
    prefill_s_per_token: float = setting(0.00004, "Seconds per prompt token to compute.", min=1e-9)
    prefill_s_per_token_pair: float = setting(
        0.0,
        "Seconds per prompt token to compute and token before it; 0: attention is part of the time per token.",
        min=0,
    )
    decode_step_base_s: float = setting(0.006, "Seconds of a decode step that do not depend on the batch.", min=0)
    decode_s_per_request: float = setting(0.00002, "Seconds that each running request adds to a step.", min=0)
    decode_s_per_kv_token: float = setting(
        0.00000004, "Seconds that each token held in KV adds to a step: its bytes over the memory's bandwidth.", min=0
    )
    kv_bytes_per_token: int = setting(131_072, "Bytes of KV per token; 8 heads of 128, 32 layers, 2 bytes.", min=1)
    handoff_s: float = setting(
        0.002, "Seconds of a handoff that do not depend on its size: one more call, one read.", min=0
    )
    host_bytes_per_s: float = setting(
        20e9, "Bytes of KV per second between workers of one host.", unit="bytes per second", min=1
    )
    zone_bytes_per_s: float = setting(
        10e9, "The same between hosts of one zone; without zone labels all are in one.", unit="bytes per second", min=1
    )
    far_bytes_per_s: float = setting(2.5e9, "The same between zones.", unit="bytes per second", min=1)
    zone_label: str = setting("zone", "Label that names the zone of a worker.")
    itl_target_s: float = setting(0.1, "Inter-token latency target of workers whose profile has none.", min=0.0001)
    chunk_tokens: int = setting(
        512,
        "Prompt tokens that a decode worker computes in one step beside its batch; the step must keep the target.",
        min=1,
    )
    output_tokens: int = setting(256, "Expected output tokens of a request that does not say.", min=1)
    decode_weight: float = setting(
        0.5,
        "Cost, in seconds to first token, of a second by which decoding is delayed, of the request or of its neighbours.",
        min=0,
    )
    overdue_ratio: float = internal(
        0.1, "Part of the promised prefill time that counts at least, even when it should be over by now."
    )
    preference_s: float = setting(
        0.25, "Seconds of cost on top for a worker that lacks a preferred label, or is not the session's.", min=0
    )
    adapter_s: float = setting(0.05, "Seconds of cost on top for a worker that has not run the adapter lately.", min=0)
    adapters_warm: int = internal(8, "Adapters of its newest requests that a worker has lately run.")
    tie_ratio: float = setting(
        0.05,
        "Candidates with as many cached tokens and a cost within this ratio of the lowest are equal: coefficients are not"
        " known better. One of them is drawn; of it and the cheapest, the less loaded is taken.",
        min=0,
        max=1,
    )
    temperature: float = setting(
        0.0, "Seconds of cost by which a worker is e times less likely to be taken. 0: the cheapest is taken.", min=0
    )
    host_credit: float = setting(
        0.75, "Value of a token cached in host memory, relative to one on the device.", min=0, max=1
    )
    disk_credit: float = setting(0.25, "The same for the disk.", min=0, max=1)
    object_credit: float = setting(0.15, "The same for an object store.", min=0, max=1)
    peer_credit: float = setting(0.5, "The same for a peer's memory.", min=0, max=1)
    learning: bool = setting(True, "Whether observed times correct the coefficients.")
