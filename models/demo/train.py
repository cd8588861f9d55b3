"""Trains the demo model on CPU cores: `python models/demo/train.py`. It goes on from its last checkpoint, if there is one.

One process with one thread for each core shares the batches: a step's gradients are the mean over the processes. Everything is fixed
(seeds, steps, processes, threads), so the same machine type with the same torch gives the same weights.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # Sums of floats depend on how threads share them, so a process has one thread.

import stages
import torch
from batches import Batch, batches
from muon import Muon
from network import Network, public_name, weights
from rendering import HERE
from safetensors.torch import load_file, save_file
from torch import distributed

PROCESSES = 2
BATCH_TOKENS = 2400
RATE = 4e-3
LOG_STEPS = 10
# A mean of the weights over about the last 250 steps is saved too, because single checkpoints differ by several prompts.
AVERAGE_DECAY = 0.996


class Trainer:
    """The network with its optimizers: Muon for the matrices, AdamW for the embedding and the norms."""

    def __init__(self) -> None:
        torch.manual_seed(stages.SEED)
        self.network = Network()
        named = list(self.network.named_parameters())
        matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices, weight_decay=0.05)
        self.adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.average = [weight.detach().clone() for _, weight in named]
        self.average_steps = 0
        self.step = 0

    def update(self, batch: Batch) -> float:
        """One step. Gives the loss of this process."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.network.loss(batch.inputs, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]
        self._share_gradients()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        rate = RATE * stages.rate_factor(self.step)
        self.muon.step(rate)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        self.follow()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the average to the weights. At first it is the plain mean, so that it forgets the weights of the start."""
        self.average_steps += 1
        share = max(1 - AVERAGE_DECAY, 1 / self.average_steps)
        for mean, weight in zip(self.average, self.network.parameters(), strict=True):
            mean.lerp_(weight, share)

    def _share_gradients(self) -> None:
        gradients = [weight.grad for weight in self.network.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "network": self.network.state_dict(),
            "momenta": self.muon.momenta,
            "adam": self.adam.state_dict(),
            "average": self.average,
            "average_steps": self.average_steps,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.network.load_state_dict(state["network"])
        self.adam.load_state_dict(state["adam"])
        for momentum, saved in zip(self.muon.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        for mean, saved in zip(self.average, state["average"], strict=True):
            mean.copy_(saved)
        self.average_steps = state["average_steps"]

    def averaged(self) -> Network:
        """A network with the averaged weights."""
        network = Network()
        with torch.no_grad():
            for weight, mean in zip(network.parameters(), self.average, strict=True):
                weight.copy_(mean)
        return network


def save_weights(network: Network, path: Path) -> None:
    """Writes the weights, whole or not at all."""
    part = path.with_name(path.name + ".part")
    save_file(weights(network), part, metadata={"format": "pt"})
    os.replace(part, path)


def load_weights(network: Network, path: Path) -> None:
    """Reads what `save_weights` wrote. The optimizers begin anew."""
    found = load_file(path)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(found[public_name(name)])


def _chunk(step: int, rank: int) -> Iterator[Batch]:
    """The batches from `step` to the end of its chunk."""
    seed = f"{stages.SEED}-{rank}-{step // stages.CHUNK_STEPS}"
    found = batches(stages.samples(step, seed), seed, BATCH_TOKENS)
    return islice(found, step % stages.CHUNK_STEPS, stages.CHUNK_STEPS)


def train(rank: int, port: int, steps: int, output: Path, start: Path | None) -> None:
    """One process of the training."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    trainer, checkpoint = Trainer(), output / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif start is not None:
        load_weights(trainer.network, start)
        trainer.step = stages.CONTINUED
    started, first, tokens, mean = time.monotonic(), trainer.step, 0, 0.0
    while trainer.step < steps:
        for batch in _chunk(trainer.step, rank):
            loss = trainer.update(batch)
            tokens += batch.inputs.numel()
            mean = loss if trainer.step == first + 1 else 0.95 * mean + 0.05 * loss
            if rank == 0 and trainer.step % LOG_STEPS == 0:
                entry = {
                    "step": trainer.step,
                    "tokens": tokens * PROCESSES,
                    "loss": round(mean, 4),
                    "seconds": round(time.monotonic() - started),
                }
                print(json.dumps(entry), flush=True)
            if trainer.step == steps:
                break
        if rank == 0:
            trainer.save(checkpoint)
            save_weights(trainer.averaged(), output / "model.safetensors")
            save_weights(trainer.network, output / "last.safetensors")
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=stages.STEPS, help="stop after this step")
    parser.add_argument(
        "--output", type=Path, default=HERE / "build", help="directory of the checkpoint and the weights"
    )
    parser.add_argument(
        "--start", type=Path, help=f"weights to begin with at step {stages.CONTINUED}, where there is no checkpoint"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    inputs = (_free_port(), arguments.steps, arguments.output, arguments.start)
    torch.multiprocessing.spawn(train, inputs, nprocs=PROCESSES)


if __name__ == "__main__":
    main()
