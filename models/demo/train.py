"""Trains the demo model on one CPU core: `OMP_NUM_THREADS=1 python models/demo/train.py`.

Everything is fixed (seeds, steps, one thread), so the same machine type with the same torch gives the same weights.
"""

import argparse
import json
import math
import os
import time
from itertools import islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # Sums of floats depend on how threads share them, so there is one thread only.

import torch
from batches import Batch, batches
from rendering import HERE
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20
STEPS = 1800
SCHEDULE_STEPS = 2100
BATCH_TOKENS = 1400
BATCHES_PER_STEP = 3
WARM_UP_STEPS = 40
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3


def make_model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig.from_json_file(str(HERE / "config.json")))  # type: ignore[no-untyped-call]
    residual = 0.02 / math.sqrt(2 * model.config.num_hidden_layers)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(weight, std=residual)
    # On one core and with short rows this is a seventh faster than the fused kernel.
    model.set_attn_implementation("eager")
    model.to(torch.float32)  # type: ignore[arg-type]
    return model


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int) -> float:
    """Up over the warm-up, level for half of the schedule, then straight down to nearly zero at its end.

    The run stops before that end, to stay within fifty minutes of one busy core.
    """
    return min((step + 1) / WARM_UP_STEPS, 1.0, max((SCHEDULE_STEPS - step) / (SCHEDULE_STEPS * 0.5), 0.01))


def batch_loss(model: LlamaForCausalLM, batch: Batch, weight_total: float) -> torch.Tensor:
    """The batch's share of the step's weighted mean loss."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        logits = hidden @ model.get_input_embeddings().weight.T
    losses = cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum() / weight_total


def train_step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], group: list[Batch], factor: float
) -> float:
    weight_total = sum(float(batch.weights.sum()) for batch in group)
    total = 0.0
    for batch in group:
        loss = batch_loss(model, batch, weight_total)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        optimizer.zero_grad()
    return total


def save(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes the weights in bfloat16, whole or not at all. The tied output matrix is not stored twice."""
    from safetensors.torch import save_file

    tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(directory / "model.safetensors.part", directory / "model.safetensors")


def train(steps: int, save_every: int, directory: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = make_model()
    optimizers, stream, started = make_optimizers(model), batches(SEED, BATCH_TOKENS), time.monotonic()
    tokens, mean = 0, 0.0
    for step in range(steps):
        group = list(islice(stream, BATCHES_PER_STEP))
        loss = train_step(model, optimizers, group, rate_factor(step))
        tokens += sum(int((batch.weights > 0).sum()) for batch in group)
        mean = loss if step == 0 else 0.95 * mean + 0.05 * loss
        if step % 20 == 0 or step == steps - 1:
            entry = {
                "step": step,
                "tokens": tokens,
                "loss": round(mean, 4),
                "seconds": round(time.monotonic() - started),
            }
            print(json.dumps(entry), flush=True)
        if step % save_every == save_every - 1 or step == steps - 1:
            save(model, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument("--save-every", type=int, default=150, help="steps between writes of the weights")
    parser.add_argument("--output", type=Path, default=HERE, help="directory that gets model.safetensors")
    arguments = parser.parse_args()
    train(arguments.steps, arguments.save_every, arguments.output)


if __name__ == "__main__":
    main()
