"""Measure OpenVINO GenAI's continuous-batching pipeline on an exported IR folder.

The model is ``PATH`` or ``PATH,PROPERTY=VALUE,...`` with OpenVINO properties that replace its defaults, such
as ``INFERENCE_PRECISION_HINT=f32``: on processors with AMX its default is bfloat16.
"""

from __future__ import annotations

import openvino as ov
import openvino_genai as og
from worker import Timing, Work, clock, serve


def load(argument: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    path, *given = argument.split(",")
    scheduler = og.SchedulerConfig()
    scheduler.cache_size = 8  # GB; states of hybrids in float32 take more than 4
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    properties = dict(text.split("=", 1) for text in given)
    pipeline = og.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)

    def measure(work: Work) -> Timing:
        """Add the prompts and step until their end; ``read`` has the tokens since the last one."""
        config = og.GenerationConfig()
        config.max_new_tokens = work.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        start = clock()
        rows = [
            pipeline.add_request(number, ov.Tensor(row[None]), config)
            for number, row in enumerate(work.prompts())
        ]
        counts, moments = [0] * len(rows), []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, row in enumerate(rows):
                while row.can_read():
                    counts[number] += sum(len(output.generated_ids) for output in row.read().values())
            if min(counts) > len(moments):
                moments.append(clock())
        return Timing.of(start, moments, sum(counts))

    return " ".join([f"openvino-genai {og.__version__}", *given]), measure


serve(load)
