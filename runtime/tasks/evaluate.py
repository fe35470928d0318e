"""``carryall.evaluate``: measure the perplexity of a model, and its divergence from a reference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError
from ...progress import Progress, phase
from ...records import dataclass
from ...reports import Report
from ...storage.texts import read_text
from ..evaluate.evaluation import GreedyAgreement, Prediction, Stored, greedy_agreement, predict
from ..evaluate.held_out import held_out_text
from ..evaluate.stored_decoder import StoredDecoder
from ..models.calibration import MOST_TEXT
from ..models.config import ModelConfig, model_config
from ..models.loading import LoadedModel, load_model
from ..models.model_source import resolve_model
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer
from ..types.arguments import checked_arguments

_LONGEST_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport(Report):
    """The result of an evaluation.

    Attributes:
        model: the evaluated model.
        reference: the reference model, or None.
        prediction: perplexity, and KL divergence from the reference.
        greedy: agreement of the greedy outputs of both models; None without a reference.
        notes: which provider was chosen, and which nodes fell back to the CPU.
    """

    model: str
    reference: str | None
    prediction: Prediction
    greedy: GreedyAgreement | None
    notes: tuple[str, ...] = ()

    @property
    def perplexity_ratio(self) -> float | None:
        """The perplexity divided by that of the reference; None without a reference."""
        found = self.prediction
        return None if found.reference_perplexity is None else found.perplexity / found.reference_perplexity

    def to_dict(self) -> dict[str, Any]:
        facts = {"model": self.model, "reference": self.reference, **asdict(self.prediction)}
        if self.perplexity_ratio is not None:
            facts["perplexity_ratio"] = self.perplexity_ratio
        return {**facts, "greedy": None if self.greedy is None else asdict(self.greedy)}

    def rows(self) -> list[tuple[str, str]]:
        prediction, greedy = self.prediction, self.greedy
        run = "perplexity" if prediction.stored is None else "perplexity as run"
        rows = [(run, f"{prediction.perplexity:.4f} over {prediction.tokens} tokens")]
        if self.perplexity_ratio is not None:
            rows += [
                (
                    "reference perplexity",
                    f"{prediction.reference_perplexity:.4f}, ratio {self.perplexity_ratio:.5f}",
                ),
                ("KL divergence", f"mean {prediction.mean_kl:.3g}, largest {prediction.max_kl:.3g}"),
                ("top-1 agreement", f"{100 * (prediction.top1_agreement or 0):.2f} %"),
            ]
        if prediction.stored is not None:
            rows += _stored_rows(prediction.stored)
        if greedy is not None:
            share = f"{100 * greedy.agreement:.1f} % of tokens"
            rows += [
                (
                    "greedy agreement",
                    f"{share}, {greedy.equal_prompts} of {greedy.prompts} prompts throughout",
                ),
                ("decoding", f"{greedy.tokens_per_second:.0f} tokens/s, {greedy.prompts} prompts at once"),
            ]
        return [*rows, ("reading", f"{prediction.tokens_per_second:.0f} tokens/s")]


def _stored_rows(stored: Stored) -> list[tuple[str, str]]:
    rows = [("perplexity as stored", f"{stored.perplexity:.4f}, with float activations")]
    if stored.mean_kl is not None and stored.max_kl is not None:
        kl = f"mean {stored.mean_kl:.3g}, largest {stored.max_kl:.3g}"
        rows += [
            ("KL as stored", kl),
            ("top-1 as stored", f"{100 * (stored.top1_agreement or 0):.2f} %"),
        ]
    return rows


@checked_arguments
def evaluate(
    model: str | Path | ModelConfig,
    text: str | Path | None = None,
    *,
    reference: str | Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    prompts: int = 8,
    new_tokens: int = 32,
    as_stored: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> EvaluationReport:
    """Measure the perplexity of a model on a text, and its divergence from a reference model.

    The text is scored in overlapping windows, every token once.

    Args:
        model: a package, a checkpoint folder, a hub id, or ``demo``; or a ``ModelConfig`` with all options.
        text: the text itself as ``str``, or a ``Path`` to a text file. The model should not have been trained
            on it. None takes the held-out text in the folder of a model, as the demo has.
        reference: a model with the same vocabulary, such as the one before quantization.
        window: tokens of a window; None takes the context length, at most 1024.
        stride: distance between the starts of windows; None takes half a window.
        max_tokens: maximum number of tokens of the text.
        prompts: with a reference, the number of prompts, taken from the text, whose greedy outputs are
            compared.
        new_tokens: length of those outputs.
        as_stored: also measure the model as it is stored, with activations in float32. A provider may round
            them, for instance to int8, so the difference is the price of running.
        progress: called in the phases ``prepare`` and ``eval``.
        **fields: fields of ``ModelConfig`` for both models; ``quantize`` and ``kv_cache_dtype`` apply to
            ``model`` only.

    Raises:
        UsageError: there is no such model or text, the text is too short, or a number is out of range.
        ProviderUnavailableError: the provider is not available on this machine.
        ProviderRuntimeError: the run failed, or its logits are NaN or infinite.
    """
    for name, value, least in (("max_tokens", max_tokens, 1), ("prompts", prompts, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    models = _compared(model_config(model, fields), reference)
    names = [str(path.model) for path in models]
    content = _content(text, names)
    with contextlib.ExitStack() as stack:
        loaded = [stack.enter_context(_opened(models[0], prompts, progress))]
        tokenizer = _tokenizer(loaded[0])
        tokens = np.array(tokenizer.encode(content, add_special_tokens=False)[:max_tokens], np.int64)
        loaded += [stack.enter_context(_opened(path, prompts, progress)) for path in models[1:]]
        runners = [path.runner for path in loaded]
        width = window or min(_LONGEST_WINDOW, *(runner.info.context_length for runner in runners))
        prediction = predict(
            runners[0],
            tokens,
            window=width,
            stride=stride or max(1, width // 2),
            reference=runners[1] if len(runners) > 1 else None,
            stored=_stored_decoder(models[0]) if as_stored else None,
            beginning=tokenizer.beginning,
            progress=phase(progress, "eval"),
        )
        greedy = greedy_agreement(runners, tokens, prompts, new_tokens, tokenizer.beginning)
    return EvaluationReport(
        model=names[0],
        reference=names[1] if reference is not None else None,
        prediction=prediction,
        greedy=greedy,
        notes=tuple(note for path in loaded for note in load_notes(path)),
    )


def _compared(model: ModelConfig, reference: str | Path | None) -> list[ModelConfig]:
    """Return the evaluated model and its reference, if any: the same options, but not quantized."""
    if reference is None:
        return [model]
    return [model, dataclasses.replace(model, model=reference, quantize=None, kv_cache_dtype=None)]


@contextlib.contextmanager
def _opened(model: ModelConfig, prompts: int, progress: Progress | None) -> Iterator[LoadedModel]:
    """Load a model that runs so many prompts at once, and free it at the end."""
    loaded = load_model(model, max_slots=max(1, prompts), progress=phase(progress, "prepare"))
    with contextlib.closing(loaded.runner):
        yield loaded


def _stored_decoder(config: ModelConfig) -> StoredDecoder:
    source = resolve_model(config.model, quantize=config.quantize, rope_scaling=config.rope_scaling)
    if source.lowered:
        raise UsageError(f"{source.name} was lowered for a provider, so it cannot be measured as stored")
    return StoredDecoder(source.portable_file(), source.name)


def load_notes(loaded: LoadedModel) -> list[str]:
    """Return which provider and layers were chosen, if any were, and which nodes fell back to the CPU."""
    choices = [str(choice) for choice in (loaded.choice, loaded.placed) if choice is not None]
    return [*choices, *(f"some nodes fell back:\n{placed}" for placed in loaded.fallbacks)]


def _content(text: str | Path | None, models: list[str]) -> str:
    if isinstance(text, str):
        return text
    path = text or held_out_text(*models)
    if path is None:
        raise UsageError("a text to evaluate is missing: --text FILE")
    return read_text(path, most=MOST_TEXT)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise UsageError(f"{model.name} has no {TOKENIZER_FILE}: add the file to its folder")
    return model.tokenizer
