"""Is one graph as good as another? Both run on the same inputs, and what they return is compared.

Decoders run on tokens, whichever of the two contracts of ``docs/architecture.md`` each follows; every other
graph runs on named tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ...errors import UsageError, VerificationError
from ..graph.edit import static_size
from ..graph.lazy import Array
from ..graph.load import load_model
from .comparison import (
    Bar,
    Comparison,
    LogitsComparison,
    compared_logits,
    largest_error,
    output_error,
    output_errors,
    worst,
)
from .runners import Logits, Tokens, is_decoder, open_session, runner, running
from .sample_inputs import sample_inputs

_PROMPT_TOKENS = 32


class Decoder(Protocol):
    """What generates logits: a ``GraphRunner``, or anything that runs a graph by other means."""

    @property
    def vocab_size(self) -> int | str:
        """See ``GraphRunner``."""

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """See ``GraphRunner``."""

    def cache(self, row: int) -> dict[str, Array]:
        """See ``GraphRunner``; empty where it cannot be read."""


class Opener(Protocol):
    """Makes a decoder of a file."""

    def __call__(self, model: Path, *, slots: int, max_length: int) -> Decoder:
        """Open ``model`` for sequences 0 to ``slots`` - 1 of up to ``max_length`` tokens."""


def compare(a: Path, b: Path, prompt: Sequence[int], *, steps: int = 16) -> LogitsComparison:
    """Run two decoders on a prompt, then on the greedy tokens of ``a``, and compare all logits."""
    return compare_prompts(a, b, [prompt], steps=steps)


def compare_prompts(
    a: Path, b: Path, prompts: Sequence[Sequence[int]], *, steps: int = 16, open_b: Opener = runner
) -> LogitsComparison:
    """``compare`` on several prompts; the worst of each figure.

    Args:
        a: a decoder that onnxruntime runs on the CPU.
        b: another one.
        prompts: token ids, run as sequences of their own.
        steps: greedy tokens of ``a`` that follow.
        open_b: runs ``b`` where onnxruntime's CPU provider cannot.

    Raises:
        UsageError: their vocabularies differ.
    """
    length = max(map(len, prompts)) + steps + 1
    first = runner(a, slots=len(prompts), max_length=length)
    second = open_b(b, slots=len(prompts), max_length=length)
    if first.vocab_size != second.vocab_size and {type(first.vocab_size), type(second.vocab_size)} == {int}:
        sizes = f"{first.vocab_size} and {second.vocab_size}"
        raise UsageError(f"the models have different vocabularies: {sizes} tokens")
    return worst([_compare_row(first, second, row, prompts[row], steps) for row in range(len(prompts))])


def compare_feed(a: Path, b: Path, feed: Mapping[str, Array]) -> Comparison:
    """Run two graphs once on named tensors.

    Raises:
        UsageError: one of them wants an input that is not among them, or they share no output.
    """
    results = [_run(model, feed) for model in (a, b)]
    outputs = output_errors(*results)
    if not outputs:
        raise UsageError(
            f"{a} and {b} have no output in common: {', '.join(results[0])}; {', '.join(results[1])}"
        )
    largest = largest_error(list(outputs.values()))
    if "logits" not in outputs:
        return Comparison(max_abs=largest.max_abs, max_rel=largest.max_rel, outputs=outputs)
    left, right = (side["logits"].reshape(-1, side["logits"].shape[-1]) for side in results)
    agree = list(left.argmax(-1) == right.argmax(-1))
    return compared_logits(left, right, agree, outputs)


def compare_graphs(a: Path, b: Path, *, steps: int = 16) -> Comparison:
    """Run two graphs on inputs made up: decoders on random tokens, others on random tensors.

    Raises:
        GraphError: one of them cannot be read, or is no valid graph.
        UsageError: their inputs or vocabularies differ.
    """
    graphs = [load_model(model).graph for model in (a, b)]
    if not all(is_decoder(graph) for graph in graphs):
        return compare_feed(a, b, sample_inputs(graphs[0]))
    return compare(a, b, sample_prompt(graphs[0]), steps=steps)


def sample_prompt(graph: ir.Graph) -> list[int]:
    """Make up a prompt for a decoder.

    Raises:
        UsageError: the graph does not state its vocabulary.
    """
    size = next(static_size(output, -1) for output in graph.outputs if output.name == "logits")
    if size is None:
        raise UsageError("the vocabulary of the graph has no fixed size; give --inputs")
    tokens: list[int] = np.random.default_rng(0).integers(0, size, _PROMPT_TOKENS).tolist()
    return tokens


def verify(a: Path, b: Path, prompt: Sequence[int], *, max_kl: float, steps: int = 16) -> LogitsComparison:
    """Compare two decoders and insist on a bar.

    Raises:
        VerificationError: the divergence is above ``max_kl``.
    """
    result = compare(a, b, prompt, steps=steps)
    reason = result.misses(Bar(max_kl, np.inf))
    if reason is not None:
        raise VerificationError(
            f"{b} differs from {a}: {reason} (max abs {result.max_abs:.3g}, "
            f"{result.greedy_equal} of {result.steps} greedy tokens equal)"
        )
    return result


def compare_models(a: ir.Model, b: ir.Model, prompt: Sequence[int], *, steps: int = 16) -> LogitsComparison:
    """``compare`` for graphs in memory; they are written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("a.onnx", "b.onnx")]
        for model, path in zip((a, b), paths, strict=True):
            ir.save(model, path, external_data=f"{path.name}.data")
        return compare(paths[0], paths[1], prompt, steps=steps)


def _compare_row(
    first: Decoder, second: Decoder, row: int, prompt: Sequence[int], steps: int
) -> LogitsComparison:
    tokens = np.array(prompt, np.int64)
    pairs: list[tuple[Logits, Logits]] = []
    agree: list[bool] = []
    for _ in range(steps + 1):
        left, right = first.forward({row: tokens})[row], second.forward({row: tokens})[row]
        pairs.append((left, right))
        agree.append(bool(left[-1].argmax() == right[-1].argmax()))
        tokens = left[-1:].argmax(-1)
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    outputs = {"logits": output_error(left, right)} | output_errors(first.cache(row), second.cache(row))
    return compared_logits(left, right, agree, outputs)


def _run(model: Path, feed: Mapping[str, Array]) -> dict[str, Array]:
    session = open_session(model)
    names = [value.name for value in session.get_inputs()]
    missing = [name for name in names if name not in feed]
    if missing:
        raise UsageError(
            f"{model} wants the input {missing[0]}, and there is none of that name: {', '.join(feed)}"
        )
    with running(model):
        results = session.run(None, {name: feed[name] for name in names})
    return _tensors(zip([value.name for value in session.get_outputs()], results, strict=True))


def _tensors(results: Iterable[tuple[str, Any]]) -> dict[str, Array]:
    """Name the tensors of the outputs, those of a sequence by their number; an absent optional left out."""
    found: dict[str, Array] = {}
    for name, result in results:
        if isinstance(result, list):
            found |= _tensors((f"{name}[{number}]", one) for number, one in enumerate(result))
        elif result is not None:
            found[name] = np.asarray(result)
    return found
