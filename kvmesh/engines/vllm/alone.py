"""One vLLM engine without the mesh, as a reference for its tokens: `python -m kvmesh.engines.vllm.alone`.

Reads {"model", "prompts", "max_tokens", "dtype"} as JSON from standard input. Prints "ANSWERS " and the greedy token ids as JSON.
Without "dtype", vLLM uses the model's own. It runs one prompt at a time, and so must the mesh in the comparison: rounding depends on
the batch.
"""

import json
import os
import sys

from kvmesh.engines.vllm.environment import set_defaults
from kvmesh.engines.vllm.settings import CPU_BLOCK_SIZE_TOKENS

MARK = "ANSWERS "
KV_BYTES = 64 << 20


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    set_defaults()
    import vllm
    from vllm.platforms import current_platform

    task = json.load(sys.stdin)
    on_cpu = {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE_TOKENS, "kv_cache_memory_bytes": KV_BYTES}
    engine = vllm.LLM(
        task["model"],
        dtype=task.get("dtype", "auto"),
        max_model_len=-1,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **(on_cpu if current_platform.is_cpu() else {}),
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False)
    answers = []
    for prompt in task["prompts"]:
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    sys.stdout.write(f"{MARK}{json.dumps(answers)}\n")
    sys.stdout.flush()
    # Device libraries may hang when the process exits normally.
    os._exit(0)


if __name__ == "__main__":
    main()
