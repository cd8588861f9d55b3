"""One vLLM engine without kvmesh: reads {"model", "prompts", "max_tokens"} on stdin, prints the greedy token ids as JSON.

One prompt at a time, as in the test that compares: the order of additions inside a batch depends on the batch.
"""

import json
import os
import sys


def main() -> None:
    """Runs and leaves."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
    )
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="")
    import vllm

    task = json.load(sys.stdin)
    engine = vllm.LLM(
        task["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False)
    answers = []
    for prompt in task["prompts"]:
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    print("ANSWERS " + json.dumps(answers), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
