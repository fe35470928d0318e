"""Measure the cost of a quantization for ``carryall quantize --report``: errors, predictions and speed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError
from ...exporter.package import MODEL_FILE, Package
from ...graph_opt.graph.saving import save_model
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.algorithms.rotate import RotatePass
from ...graph_opt.quantize.algorithms.smooth import SmoothQuantPass
from ...graph_opt.quantize.search.layer_errors import layer_errors
from ...progress import Progress, phase
from ...providers.base import Runner
from ...providers.host.machine import describe_machine, usable_cores
from ...storage.texts import read_text
from ..engine.engine import Engine, EngineConfig
from ..models.find import side_folder
from ..models.float_model import FloatModel
from ..models.graphs import load_graph
from ..models.loading import check_available, load_model
from ..models.model_source import locate_model
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer
from .evaluation import Tokens, greedy_agreement, predict
from .held_out import HELD_OUT
from .throughput import Workload, interleaved, spread

_PROVIDER = "cpu"
_TOKENS, _WINDOW = 4096, 512
_PROMPTS, _CONTINUATION = 8, 32
_ROUNDS = 5


def check_measurable(source: str) -> None:
    """Check before any work that the cost of quantizing a model can be measured.

    Raises:
        UsageError: the model has no tokenizer.
        ProviderUnavailableError: onnxruntime is not installed.
    """
    if not (side_folder(locate_model(source)) / TOKENIZER_FILE).is_file():
        raise UsageError(
            f"--report evaluates a text, but {source} has no tokenizer: quantize a package or checkpoint, "
            f"or add {TOKENIZER_FILE} to its folder"
        )
    check_available(_PROVIDER)


def measure_cost(
    source: str,
    out: Path,
    passes: Sequence[GraphPass],
    measured: FloatModel,
    scratch: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare a quantized model with its source.

    Args:
        source: the model before quantization.
        out: the quantized model.
        passes: the passes that quantized it.
        measured: the float model with the calibration text.
        scratch: a temporary folder.
        progress: called for layers and windows, in the phase ``evaluate``.

    Returns:
        ``layer_errors`` by weight, ``fidelity``, ``speed`` before and after, and ``machine``.
    """
    facts: dict[str, Any] = {"layer_errors": _layer_errors(source, out, passes, measured, scratch, progress)}
    with contextlib.ExitStack() as stack:
        runners = []
        for model in (out, source):
            loaded = load_model(model, provider=_PROVIDER, max_slots=_PROMPTS)
            runners.append(loaded.runner)
            stack.callback(loaded.runner.close)
        facts["fidelity"] = _fidelity(runners, source, measured, progress)
        facts["speed"] = _speed(runners)
    facts["machine"] = f"{describe_machine().cpu}, {usable_cores()} cores, provider {_PROVIDER}"
    return facts


def summary(facts: dict[str, Any]) -> str:
    """Return the cost in quality and the gain in speed as one line."""
    fidelity, speed = facts["fidelity"], facts["speed"]
    decode, prefill = (
        speed["after"][what]["median"] / speed["before"][what]["median"] for what in ("decode", "prefill")
    )
    return (
        f"perplexity {fidelity['perplexity_ratio']:.4f} times the original's, KL {fidelity['mean_kl']:.3g}, "
        f"top-1 agreement {100 * fidelity['top1_agreement']:.1f} %; "
        f"decode {decode:.2f}x, prefill {prefill:.2f}x as fast"
    )


def _layer_errors(
    source: str,
    out: Path,
    passes: Sequence[GraphPass],
    measured: FloatModel,
    scratch: Path,
    progress: Progress | None,
) -> dict[str, float]:
    """Measure the errors against the float model, changed as the channels were before rounding."""
    reference = measured.graph
    moved = [pass_ for pass_ in passes if isinstance(pass_, RotatePass | SmoothQuantPass)]
    if moved:
        rescaled, _ = run(load_graph(source)[0], moved)
        reference = scratch / "rescaled" / MODEL_FILE
        reference.parent.mkdir()
        save_model(rescaled, reference)
    quantized = Package.open(out).model_path if out.is_dir() else out
    return layer_errors(reference, quantized, measured.longest_window(), phase(progress, "evaluate"))


def _fidelity(
    runners: list[Runner], source: str, measured: FloatModel, progress: Progress | None
) -> dict[str, Any]:
    text, tokens, beginning = _text(source, measured)
    context = min(runner.info.context_length for runner in runners)
    window = min(_WINDOW, context)
    prediction = predict(
        runners[0],
        tokens,
        window=window,
        stride=max(1, window // 2),
        reference=runners[1],
        beginning=beginning,
        progress=phase(progress, "evaluate"),
    )
    greedy = greedy_agreement(runners, tokens, _PROMPTS, min(_CONTINUATION, context // 2), beginning)
    facts = {"text": text, **asdict(prediction), "greedy": None if greedy is None else asdict(greedy)}
    facts["perplexity_ratio"] = prediction.perplexity / (
        prediction.reference_perplexity or prediction.perplexity
    )
    return facts


def _text(source: str, measured: FloatModel) -> tuple[str, Tokens, list[int]]:
    """Return the evaluation text's name, its tokens, and those that precede a text.

    It is the held-out text, if the model has one.
    """
    folder = side_folder(locate_model(source))
    held_out, tokenizer = folder / HELD_OUT, Tokenizer(folder)
    if not held_out.is_file():
        return "the end of the calibration text", measured.unread(_TOKENS), tokenizer.beginning
    tokens = tokenizer.encode(read_text(held_out), add_special_tokens=False)[:_TOKENS]
    return HELD_OUT, np.array(tokens, np.int64), tokenizer.beginning


def _speed(runners: list[Runner]) -> dict[str, Any]:
    """Return the speed of one sequence in tokens per second, both models interleaved."""
    context = min(runner.info.context_length for runner in runners)
    work = Workload(batch=1, prompt_tokens=min(256, context // 2), new_tokens=min(64, context // 4))
    names = ("after", "before")
    engines = {
        name: Engine(runner, EngineConfig(prefix_cache=False))
        for name, runner in zip(names, runners, strict=True)
    }
    samples = interleaved(engines, work, _ROUNDS)
    facts: dict[str, Any] = {"prompt_tokens": work.prompt_tokens, "new_tokens": work.new_tokens}
    for name in names:
        facts[name] = {
            "prefill": spread([sample.prefill for sample in samples[name]]),
            "decode": spread([sample.decode for sample in samples[name]]),
        }
    return facts
