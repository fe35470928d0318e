"""Measure llama.cpp on a GGUF file through its C interface (llama-cpp-python)."""

from __future__ import annotations

import os

import llama_cpp as llama
import numpy as np
from worker import Timing, Work, clock, serve


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def measure(work: Work) -> Timing:
        context, batch = _open(model, work)
        try:
            start = clock()
            last = []
            for row, prompt in enumerate(work.prompts()):
                _decode(
                    context, batch, [(int(t), p, row, p == len(prompt) - 1) for p, t in enumerate(prompt)]
                )
                last.append(_best(context, -1, vocab_size))
            moments = [clock()]
            for step in range(work.new_tokens - 1):
                rows = [(token, work.prompt_tokens + step, row, True) for row, token in enumerate(last)]
                _decode(context, batch, rows)
                last = [_best(context, row, vocab_size) for row in range(work.batch)]
                moments.append(clock())
            return Timing.of(start, moments, work.batch * work.new_tokens)
        finally:
            llama.llama_batch_free(batch)
            llama.llama_free(context)

    return f"llama.cpp ({llama.__version__}) {os.path.basename(path)}", measure


def _open(model, work: Work):  # noqa: ANN001, ANN202
    params = llama.llama_context_default_params()
    params.n_ctx = work.batch * (work.prompt_tokens + work.new_tokens + 64)
    params.n_seq_max = work.batch
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama.llama_init_from_model(model, params)
    return context, llama.llama_batch_init(max(work.prompt_tokens, work.batch), 0, 1)


def _decode(context, batch, entries: list[tuple[int, int, int, bool]]) -> None:  # noqa: ANN001
    for start in range(0, len(entries), 512):
        chunk = entries[start : start + 512]
        batch.n_tokens = len(chunk)
        for i, (token, position, row, wanted) in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")


def _best(context, index: int, vocab_size: int) -> int:  # noqa: ANN001
    logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, index), (vocab_size,))
    return int(logits.argmax())


serve(load)
