"""vLLM's answers about a model folder, as JSON: python run_vllm.py FOLDER PROMPT... (in an environment of its own)."""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    folder, new, *prompts = sys.argv[1:]
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=512, trust_remote_code=True)
    asked = SamplingParams(temperature=0, max_tokens=int(new), prompt_logprobs=0)
    results = []
    for output in model.generate(prompts, asked, use_tqdm=False):
        told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        results.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": list(output.outputs[0].token_ids),
                "loss": [-logprobs[token].logprob for token, logprobs in told],
            }
        )
    cache = model.llm_engine.vllm_config.cache_config
    print(json.dumps({"results": results, "cached_tokens": cache.num_gpu_blocks * cache.block_size}))
