"""The Llama architecture in plain torch, for training: fewer and larger operations than the one of transformers.

`weights` names the tensors as transformers, vLLM and SGLang do.
"""

import json
import math

import torch
from rendering import HERE
from torch import Tensor, nn
from torch.nn import functional


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


class Layer(nn.Module):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.size = size
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.post_attention_layernorm = nn.Parameter(torch.ones(width))
        self.q_proj = nn.Linear(width, config["num_attention_heads"] * size, bias=False)
        self.k_proj = nn.Linear(width, config["num_key_value_heads"] * size, bias=False)
        self.v_proj = nn.Linear(width, config["num_key_value_heads"] * size, bias=False)
        self.o_proj = nn.Linear(config["num_attention_heads"] * size, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, wanted: Tensor | None = None) -> Tensor:
        """With `wanted`, a mask of (rows, columns), only those positions go on after the attention: (positions, width)."""
        rows, columns, width = states.shape
        normed = functional.rms_norm(states, (width,), self.input_layernorm, 1e-5)
        query, key, value = (
            projection(normed).view(rows, columns, -1, self.size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        # In bfloat16 a CPU computes the gradient of the attention at half the speed of float32, and all other products at three times.
        with torch.autocast("cpu", enabled=False):
            mixed = functional.scaled_dot_product_attention(
                query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True
            )
        mixed = mixed.transpose(1, 2).reshape(rows, columns, -1)
        if wanted is not None:
            states, mixed = states[wanted], mixed[wanted]
        states = states + self.o_proj(mixed)
        normed = functional.rms_norm(states, (width,), self.post_attention_layernorm, 1e-5)
        return states + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Network(nn.Module):
    """The output matrix is the embedding."""

    cosine: Tensor
    sine: Tensor

    def __init__(self) -> None:
        super().__init__()
        config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
        self.embed_tokens = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"]))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"]))
        size = config["head_dim"]
        rates = config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self._initialise(config["num_hidden_layers"])

    def _initialise(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_residual = "o_proj" in name or "down_proj" in name
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """The final states of the positions that `wanted`, a mask of (rows, columns), chooses: (positions, width)."""
        states = functional.embedding(ids, self.embed_tokens)
        cosine, sine = self.cosine[: ids.shape[1]], self.sine[: ids.shape[1]]
        *lower, last = self.layers
        for layer in lower:
            states = layer(states, cosine, sine)
        states = last(states, cosine, sine, wanted)
        return functional.rms_norm(states, (states.shape[-1],), self.norm, 1e-5)

    def loss(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean loss. Only positions with a weight are compared with the vocabulary."""
        learnt = weights > 0
        scores = self(inputs, learnt) @ self.embed_tokens.T
        losses = functional.cross_entropy(scores, targets[learnt], reduction="none")
        return (losses * weights[learnt]).sum() / weights.sum()


def public_name(name: str) -> str:
    """A parameter's name in transformers, vLLM and SGLang."""
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    block = {"gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}
    block |= {"q_proj": "self_attn.", "k_proj": "self_attn.", "v_proj": "self_attn.", "o_proj": "self_attn."}
    head = name.removesuffix(".weight").removesuffix(part)
    return f"model.{head}{block.get(part, '')}{part}.weight"


def weights(network: Network) -> dict[str, Tensor]:
    """The weights in bfloat16 by their public names. The tied output matrix is not stored twice."""
    return {public_name(name): weight.detach().bfloat16().contiguous() for name, weight in network.named_parameters()}
