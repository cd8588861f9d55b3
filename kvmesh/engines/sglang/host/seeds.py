"""Seeds of single requests. SGLang honours them in its deterministic mode only, which its CPU attention does not support."""

import struct
from typing import Any

from xxhash import xxh3_64_intdigest


def honor_seeds(*, is_cpu: bool) -> None:
    """Makes every batch carry its requests' seeds. The adapter gives each request one.

    SGLang's sampler then draws each token from the seed and the position alone, so an answer can be continued by another engine. It
    cannot combine seeds with `min_p`, which the adapter refuses.
    """
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    if is_cpu:
        # SGLang's own is a kernel for GPUs.
        sampler.multinomial_with_seed = draw


def draw(logprobs: Any, seeds: Any, positions: Any) -> Any:
    """One index per row, drawn with the row's probabilities by a generator of its seed and position. Shape: rows x 1."""
    import torch

    generator = torch.Generator()
    rows = []
    for row, seed, position in zip(logprobs.exp(), seeds.tolist(), positions.tolist(), strict=False):
        generator.manual_seed(xxh3_64_intdigest(struct.pack("<qq", seed, position)))
        rows.append(torch.multinomial(row, 1, generator=generator))
    return torch.stack(rows)
