"""Measure llama.cpp's mtmd on pages: ``python llamacpp_pages.py MODEL.gguf,MMPROJ.gguf``."""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import time

import llama_cpp as llama
import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from page_work import PageTiming, PageWork
from worker import serve

_BATCH = 512


def load(given: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    path, projector = given.split(",")
    llama.llama_backend_init()
    threads = len(os.sched_getaffinity(0))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.print_timings = False, threads, False
    sight = mtmd.mtmd_init_from_file(projector.encode(), model, params)
    if not sight:
        raise RuntimeError(f"{projector} cannot be loaded")
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 8192, _BATCH, _BATCH
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def measure(work: PageWork) -> PageTiming:
        began, processor = time.perf_counter(), time.process_time()
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        length = _prompt(sight, context, work)
        token = _best(context, vocabulary)
        moments, spent = [time.perf_counter()], time.process_time() - processor
        for step in range(work.new_tokens - 1):
            batch = llama.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
            if llama.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode failed at token {step}")
            token = _best(context, vocabulary)
            moments.append(time.perf_counter())
        steps = [b - a for a, b in itertools.pairwise(moments)]
        return PageTiming(moments[0] - began, spent, statistics.median(steps), length)

    return f"llama.cpp mtmd ({llama.__version__}) {os.path.basename(projector)}", measure


def _prompt(sight, context, work: PageWork) -> int:  # noqa: ANN001
    """Compute the prompt and return its tokens."""
    sees = work.kind != "text"
    text = f"User:{mtmd.mtmd_default_marker().decode() if sees else ''}{work.question()}\nAssistant:".encode()
    pixels = np.ascontiguousarray(work.pixels())
    pointer = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd.mtmd_bitmap_init(work.width, work.height, pointer)
    chunks = mtmd.mtmd_input_chunks_init()
    given = mtmd.mtmd_input_text(text, len(text), True, True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd.mtmd_tokenize(sight, chunks, ctypes.byref(given), bitmaps, int(sees)):
        raise RuntimeError("mtmd_tokenize failed")
    count = llama.llama_pos(0)
    failed = mtmd.mtmd_helper_eval_chunks(sight, context, chunks, 0, 0, _BATCH, True, ctypes.byref(count))
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_bitmap_free(bitmap)
    if failed:
        raise RuntimeError(f"mtmd_helper_eval_chunks failed: {failed}")
    return int(count.value)


def _best(context, vocabulary: int) -> int:  # noqa: ANN001
    logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocabulary,))
    return int(logits.argmax())


serve(load, PageWork)
