"""Measure onnxruntime-genai's Generator on a model folder of its builder."""

from __future__ import annotations

import numpy as np
import onnxruntime_genai as og
from worker import Timing, Work, clock, serve


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    model = og.Model(og.Config(path))

    def measure(work: Work) -> Timing:
        prompts = work.prompts().astype(np.int32)
        length = work.prompt_tokens + work.new_tokens
        params = og.GeneratorParams(model)
        params.set_search_options(
            do_sample=False, max_length=length + 8, min_length=length + 4, batch_size=work.batch
        )
        generator = og.Generator(model, params)
        start = clock()
        generator.append_tokens(prompts if work.batch > 1 else prompts[0])
        moments = []
        for _ in range(work.new_tokens):
            generator.generate_next_token()
            moments.append(clock())
        return Timing.of(start, moments, work.batch * work.new_tokens)

    return f"onnxruntime-genai {og.__version__}", measure


serve(load)
