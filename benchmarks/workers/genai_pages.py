"""Measure OpenVINO GenAI's VLMPipeline on pages: ``python genai_pages.py FOLDER[,PROPERTY=VALUE ...]``.

FOLDER is what ``optimum.exporters.openvino.main_export`` and ``convert_tokenizer`` write.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time

import openvino
import openvino_genai as genai
from page_work import PageTiming, PageWork
from worker import serve


def load(given: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    path, *options = given.split(",")
    properties = dict(option.split("=") for option in options)
    threads = len(os.sched_getaffinity(0))
    pipeline = genai.VLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **properties)
    config = genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False

    def measure(work: PageWork) -> PageTiming:
        moments: list[tuple[float, float]] = []

        def note(_: str) -> genai.StreamingStatus:
            moments.append((time.perf_counter(), time.process_time()))
            return genai.StreamingStatus.RUNNING

        config.max_new_tokens = work.new_tokens
        pages = {} if work.kind == "text" else {"images": [openvino.Tensor(work.pixels()[None])]}
        processor = time.process_time()
        result = pipeline.generate(work.question(), generation_config=config, streamer=note, **pages)
        steps = [after[0] - before[0] for before, after in itertools.pairwise(moments)]
        return PageTiming(
            result.perf_metrics.get_ttft().mean / 1000,
            moments[0][1] - processor,
            statistics.median(steps) if steps else 0.0,
            result.perf_metrics.get_num_input_tokens(),
        )

    return f"OpenVINO GenAI {genai.__version__} {' '.join(options)}".strip(), measure


serve(load, PageWork)
