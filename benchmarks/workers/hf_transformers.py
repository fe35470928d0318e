"""Measure Hugging Face transformers, eager, in the checkpoint's dtype."""

from __future__ import annotations

import time

import torch
import transformers
from worker import Timing, Work, serve


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def generate(work: Work, new_tokens: int) -> float:
        ids = torch.from_numpy(work.prompts())
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        return time.perf_counter() - start

    def measure(work: Work) -> Timing:
        first = generate(work, 1)
        return Timing(first, generate(work, work.new_tokens) - first, work.batch * work.new_tokens)

    return f"transformers {transformers.__version__} {model.dtype}", measure


serve(load)
