"""Time of a decoding step beside the device's: `python benchmarks/engine/device_step.py`.

The device is a double: OpenVINO computes some steps on the CPU, later ones take a fixed time, in which the
processor is free, and leave the results as they are. So the rest is the host's: feeding, sampling, planning.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import openvino

from carryall import SamplingParams
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.tasks.random_model import random_model

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
WAYS: dict[str, dict[str, int]] = {
    "all logits": {},
    "64 largest": {"top_logits": 64},
    "64 largest, one step in flight": {"top_logits": 64, "steps_ahead": 1},
}
STEPS = 60


def main() -> None:
    """Print the median of each way and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=8.0)
    asked = parser.parse_args()
    infer, seconds = openvino.InferRequest.infer, asked.device_ms / 1e3
    target, model = get_provider("openvino"), random_model(SHAPE)
    for way, options in WAYS.items():
        for rows in (1, 8, 32):
            openvino.InferRequest.infer = infer
            config = RunnerConfig(max_slots=rows, context_length=512, num_threads=1, options=dict(options))
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                save_model(run(model.clone(), target.passes(config))[0], path)
                engine = Engine(target.runner(path, config), EngineConfig(prefix_cache=False))
                print(f"{way}, {rows} rows: {_step(engine, rows, seconds):.2f} ms a step")
                engine.close()


def _step(engine: Engine, rows: int, seconds: float) -> float:
    greedy = SamplingParams(max_tokens=3 * STEPS, ignore_eos=True, temperature=0.0)
    for row in range(rows):
        engine.add(Request(str(row), [1, 2, 3 + row], greedy))
    for _ in range(STEPS):
        engine.step()
    openvino.InferRequest.infer = lambda request: time.sleep(seconds)
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return 1e3 * float(np.median(times))


if __name__ == "__main__":
    main()
