"""The Muon optimizer in float32, for matrices; its work is divided among the processes of a training.

https://kellerjordan.github.io/posts/muon: momentum, made orthogonal by five Newton-Schulz steps. torch's own one computes in bfloat16,
which is slow on a CPU without instructions for it.
"""

import math

import torch
from torch import Tensor, distributed

_MOMENTUM = 0.95
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


def _orthogonal(matrix: Tensor) -> Tensor:
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / (found.norm() + 1e-7)
    for _ in range(_STEPS):
        square = found @ found.T
        found = _A * found + (_B * square + _C * square @ square) @ found
    return found.T if is_tall else found


class Muon:
    """Updates `matrices` from their gradients, which must be the same in all processes."""

    def __init__(self, matrices: list[Tensor], weight_decay: float) -> None:
        self._matrices = matrices
        self._weight_decay = weight_decay
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Each process computes its share of the updates, then all exchange them."""
        processes, rank = distributed.get_world_size(), distributed.get_rank()
        updates = torch.zeros(sum(matrix.numel() for matrix in self._matrices))
        views = [
            view.view_as(matrix)
            for view, matrix in zip(
                updates.split([matrix.numel() for matrix in self._matrices]), self._matrices, strict=True
            )
        ]
        for index, (matrix, momentum) in enumerate(zip(self._matrices, self.momenta, strict=True)):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
            if index % processes == rank:
                views[index].copy_(_orthogonal(matrix.grad.lerp(momentum, _MOMENTUM)))
        distributed.all_reduce(updates)
        for matrix, update in zip(self._matrices, views, strict=True):
            matrix.mul_(1 - rate * self._weight_decay)
            # The scale gives an update the size that AdamW's have.
            matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))
