"""A random Llama in safetensors: small enough to be created in a fraction of a second, and with clear enough maxima for greedy sampling."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

VOCABULARY = 512
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 128, 2, 4, 2, 32, 256


def make_model(folder: Path, *, seed: int = 0, context: int = 2048) -> Path:
    """Writes config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    tensors = {name: random.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm"] + [
        f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(context)), encoding="utf-8")
    return folder


def config(context: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def add_tokenizer(folder: Path) -> Path:
    """Adds a tokenizer with one token per character. A token's id is the character's code point plus 2."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {chr(code): code + 2 for code in range(VOCABULARY - 2)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def make_adapter(folder: Path, *, rank: int = 8, seed: int = 5) -> Path:
    """Writes a random PEFT LoRA adapter for the query and value projections and the output layer, strong enough to change answers."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    outputs = {"q_proj": HEADS * HEAD_SIZE, "v_proj": KV_HEADS * HEAD_SIZE}
    tensors = {}
    for layer in range(LAYERS):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = random.normal(0, 0.3, (rank, HIDDEN)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = random.normal(0, 0.3, (size, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = random.normal(0, 0.1, (rank, HIDDEN)).astype(np.float32)
    tensors["base_model.model.lm_head.lora_B.weight"] = random.normal(0, 0.1, (VOCABULARY, rank)).astype(np.float32)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [*outputs, "lm_head"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
