"""Measure Hugging Face transformers, eager, in the checkpoint's dtype."""

from __future__ import annotations

import time

import torch
import transformers
from worker import Timing, Work, serve


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def measure(work: Work) -> Timing:
        moments: list[float] = []

        def token_is_there(tokens: torch.Tensor, scores: torch.Tensor) -> bool:
            moments.append(time.perf_counter())
            return False

        lengths = {"max_new_tokens": work.new_tokens, "min_new_tokens": work.new_tokens}
        start = time.perf_counter()
        with torch.inference_mode():
            stops = transformers.StoppingCriteriaList([token_is_there])
            model.generate(
                torch.from_numpy(work.prompts()), **lengths, do_sample=False, stopping_criteria=stops
            )
        return Timing.of(start, moments, work.batch * work.new_tokens)

    return f"transformers {transformers.__version__} {model.dtype}", measure


serve(load)
