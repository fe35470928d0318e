"""Measure perplexity, divergence and speed of quantized models for ``quality.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from portable_model import PortableModel
from quality_methods import Method

from carryall.errors import CarryallError
from carryall.providers.base import Row, Runner, RunnerInfo
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.evaluate.evaluation import Prediction, predict
from carryall.runtime.evaluate.throughput import Workload, interleaved, spread
from carryall.runtime.models.loading import load_model
from carryall.runtime.text.tokenizer import Tokenizer

Keep = Callable[[Method, dict[str, Any]], None]
_WORK = Workload(batch=1, prompt_tokens=256, new_tokens=64)


@dataclass(frozen=True, slots=True)
class Windows:
    """The first ``tokens`` tokens of a file, scored in windows of ``window`` tokens, ``stride`` apart."""

    file: Path
    tokens: int
    window: int
    stride: int


class RecordedModel:
    """The float model with its logits computed once for all candidates."""

    def __init__(self, model: PortableModel) -> None:
        self.info = model.info
        self._model = model
        self._logits: list[Any] = []
        self._next = 0

    def forward(self, rows: Sequence[Row]) -> list[Any]:
        """Return the logits of the next run of the text, computed at the first time."""
        if self._next == len(self._logits):
            self._logits.append(self._model.forward(rows))
        self._next += 1
        return cast(list[Any], self._logits[self._next - 1])

    def rewind(self) -> None:
        """Return to the start of the text, for the next candidate."""
        self._next = 0


def evaluate(
    methods: Sequence[Method],
    folder: Path,
    windows: Windows,
    results: dict[str, dict[str, Any]],
    keep: Keep,
) -> None:
    """Evaluate the graphs without lowering, and carryall's also after lowering for the CPU."""
    loaded = load_model(folder / "float", max_slots=1)
    info: RunnerInfo = loaded.runner.info
    loaded.runner.close()
    text = windows.file.read_text(encoding="utf-8")
    tokens = np.array(Tokenizer(folder / "float").encode(text)[: windows.tokens], np.int64)
    reference = RecordedModel(PortableModel(folder / "float" / "model.onnx", info))

    def evaluated(runner: Any) -> Prediction:
        reference.rewind()
        return predict(
            cast(Runner, runner),
            tokens,
            window=windows.window,
            stride=windows.stride,
            reference=cast(Runner, reference),
        )

    for method in methods:
        known = results[method.key]
        if known.get("tokens") == windows.tokens:
            continue
        try:
            facts = _facts(evaluated(PortableModel(method.file(folder), info)))
        except CarryallError as error:  # a graph for other targets, such as bf16
            print(f"{method.key} does not run without lowering: {error}", file=sys.stderr)
            facts = {}
        if method.tool == "carryall":
            runner = load_model(folder / method.key, max_slots=1).runner
            facts["lowered"] = _facts(evaluated(runner))
            runner.close()
        keep(method, {**facts, "tokens": windows.tokens})


def speed(methods: Sequence[Method], folder: Path, rounds: int, keep: Keep) -> None:
    """Measure prefill and decode speed of carryall's models, which run in turn."""
    engines = {
        method.key: Engine(
            load_model(folder / method.key, max_slots=1).runner, EngineConfig(prefix_cache=False)
        )
        for method in methods
    }
    samples = interleaved(engines, _WORK, rounds)
    for method in methods:
        engines[method.key].close()
        found = samples[method.key]
        keep(
            method,
            {
                "prefill": spread([sample.prefill for sample in found]),
                "decode": spread([sample.decode for sample in found]),
            },
        )


def _facts(found: Prediction) -> dict[str, Any]:
    return {
        "ratio": found.perplexity / (found.reference_perplexity or 1),
        "kl": found.mean_kl,
        "top1": found.top1_agreement,
    }
