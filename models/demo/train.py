"""Trains the demo model on one CPU core: `OMP_NUM_THREADS=1 python models/demo/train.py`.

The first stage learns everything at a high rate. The second goes on from the first one's weights with new optimizers:
its rate falls to nearly zero, and its text is weighted towards what needs practice. `--stage 2` runs the second alone.
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
from safetensors.torch import load_file, save_file
from stages import FIRST, SECOND, Stage
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

BATCH_TOKENS = 1400
BATCHES_PER_STEP = 3
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


def save(model: LlamaForCausalLM, path: Path) -> None:
    """Writes the weights in bfloat16, whole or not at all. The tied output matrix is not stored twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, path)


def load(model: LlamaForCausalLM, path: Path) -> None:
    tensors = load_file(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(tensors[name])


def train(stage: Stage, steps: int, save_every: int, start: Path | None, output: Path) -> None:
    """Trains from the weights in `start`, or from random ones, and writes the weights to `output` now and then."""
    torch.manual_seed(stage.seed)
    model = make_model()
    if start is not None:
        load(model, start)
    optimizers, started = make_optimizers(model), time.monotonic()
    stream = batches(stage.samples(stage.seed), stage.seed, BATCH_TOKENS)
    tokens, mean = 0, 0.0
    for step in range(steps):
        group = list(islice(stream, BATCHES_PER_STEP))
        loss = train_step(model, optimizers, group, stage.rate_factor(step))
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
            save(model, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2), help="one stage only; both without it")
    parser.add_argument("--steps", type=int, help="optimizer steps of each stage, if not those of its schedule")
    parser.add_argument("--save-every", type=int, default=150, help="steps between writes of the weights")
    parser.add_argument("--input", type=Path, help="weights that `--stage 2` starts from, if not those of stage 1")
    parser.add_argument(
        "--output", type=Path, default=HERE, help="directory of model.safetensors, build/stage1.safetensors"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    between = arguments.output / "build" / "stage1.safetensors"
    if arguments.stage != 2:
        train(FIRST, arguments.steps or FIRST.steps, arguments.save_every, None, between)
    if arguments.stage != 1:
        start, output = arguments.input or between, arguments.output / "model.safetensors"
        train(SECOND, arguments.steps or SECOND.steps, arguments.save_every, start, output)


if __name__ == "__main__":
    main()
