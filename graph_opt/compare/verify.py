"""Does one graph compute what another does? Both run on the same inputs, and what they return is judged.

Decoders run on tokens, whichever of the two contracts of ``docs/architecture.md`` each follows; every other
graph runs on named tensors.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from ...contract import INPUT_IDS, LOGITS, POSITION_IDS
from ...errors import UsageError
from ...progress import Progress
from ..analysis.probe import fixed_tokens, has_caches
from ..graph.edit import static_size
from ..graph.lazy import Array
from ..graph.load import load_model
from .bars import Bars, rounds_activations
from .decoders import Comparer, Decoder, Plan, decoder_report
from .given_inputs import given_samples, token_rows
from .input_facts import input_facts
from .reach import mask_reach
from .report import VerifyReport
from .runners import is_decoder, runner
from .sample_inputs import Sample, sample_inputs
from .tables import changed_rows
from .tensors import Side, compare_tensors

_PROMPT_TOKENS = 32
# A last axis of fewer is no vocabulary; without a cache, the logits may be those of labels.
_FEWEST_TOKENS, _FEWEST_WITHOUT_CACHE = 4, 16
_CONTEXT_KEY = "context_length"

# Lengths of sequences, as far as tokens times bytes of weights allow: about a second a graph.
_MOST_TOKENS, _WORK = 2048, 20_000_000_000

Inputs = Mapping[str, Array] | Sequence[Mapping[str, Array]] | Path


class Opener(Protocol):
    """Makes a decoder of a file."""

    def __call__(self, model: Path, *, slots: int, max_length: int, name: str | None = None) -> Decoder:
        """Open ``model`` for sequences 0 to ``slots`` - 1 of up to ``max_length`` tokens."""


def verify(
    reference: Path | ir.Model,
    candidate: Path | ir.Model,
    inputs: Inputs | None = None,
    bars: Bars | None = None,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    steps: int = 16,
    context_length: int | None = None,
    names: tuple[str, str] | None = None,
    open_candidate: Opener = runner,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run two graphs on the same inputs and judge how far apart their results are.

    Decoders are compared by the KL divergence of their next-token distributions, and where both compute in
    float32 by logits and caches too: on a prompt with its greedy continuation, in pieces, in a padded batch
    and on a long cache. Other graphs are compared output by output, see ``Tally``.

    Args:
        reference: what is right: an ONNX file, or a graph, which is written to a temporary file.
        candidate: what is judged.
        inputs: tensors by input name, several such, an .npz file or a folder of them; made up by default.
            For decoders ``input_ids`` [batch, sequence] is enough, with ``attention_mask`` if it is padded.
        bars: what must not be exceeded; by default those of the graphs' arithmetic.
        prompts: token ids to compare decoders on, each a sequence of its own; random by default.
        steps: greedy tokens of the reference that follow each prompt.
        context_length: most tokens of a sequence; by default what the graphs' metadata says.
        names: what messages call the two; paths by default.
        open_candidate: runs a candidate that onnxruntime's CPU provider cannot.
        seed: of made-up inputs.
        progress: called with how many runs are done, and how many there are.

    Returns:
        The report; ``VerifyReport.check`` raises VerificationError if it failed.

    Raises:
        GraphError: a graph cannot be read or run, or the reference refuses all made-up inputs.
        UsageError: the two have different inputs or vocabularies, or the inputs fit neither.
    """
    if inputs is not None and prompts is not None:
        raise UsageError("give either inputs or prompts")
    bars = bars or Bars()
    with _files(reference, candidate) as files:
        called = names or (_name(reference, "the reference"), _name(candidate, "the candidate"))
        graphs = [load_model(path) for path in files]
        samples = None if inputs is None else given_samples(inputs)
        judged = graphs if open_candidate is runner else graphs[:1]  # others have contracts of their own
        decoders = all(_is_decoder(model.graph) for model in judged)
        if decoders and samples is not None and not _fit(samples, graphs) and _has_tokens(samples):
            prompts = [row for sample in samples for row in token_rows(sample.feed)]
        if prompts is not None and not decoders:
            raise UsageError("prompts are for two decoders, and one of the models is none; give --inputs")
        if decoders and (samples is None or prompts is not None):
            plan = _plan(judged, graphs, prompts, steps, context_length, seed)
            return _compare_decoders(files, called, plan, bars, graphs, open_candidate, progress)
        sides = Side(files[0], called[0]), Side(files[1], called[1])
        if samples is None:
            rows = changed_rows(graphs[0].graph, graphs[1].graph)
            longest = _WORK // max(_weight_bytes(graphs[0]), 1)
            samples = sample_inputs(graphs[0].graph, sides[0].run, seed=seed, rows=rows, longest=longest)
        rounded = any(map(rounds_activations, graphs))
        return compare_tensors(*sides, samples, bars, rounded=rounded, progress=progress)


def _compare_decoders(
    files: tuple[Path, Path],
    names: tuple[str, str],
    plan: Plan,
    bars: Bars,
    models: Sequence[ir.Model],
    open_candidate: Opener,
    progress: Progress | None,
) -> VerifyReport:
    first = runner(files[0], slots=plan.slots, max_length=plan.max_length, name=names[0])
    second = open_candidate(files[1], slots=plan.slots, max_length=plan.max_length, name=names[1])
    if first.vocab_size != second.vocab_size and {type(first.vocab_size), type(second.vocab_size)} == {int}:
        sizes = f"{first.vocab_size} and {second.vocab_size}"
        raise UsageError(f"the models have different vocabularies: {sizes} tokens")
    comparer = Comparer(first, second, plan.width)
    comparer.run(plan, progress)
    return decoder_report(comparer, names, bars, rounded=any(map(rounds_activations, models)))


def _plan(
    decoders: Sequence[ir.Model],
    models: Sequence[ir.Model],
    prompts: Sequence[Sequence[int]] | None,
    steps: int,
    context_length: int | None,
    seed: int,
) -> Plan:
    """Choose tokens; none beyond the context.

    Args:
        decoders: those of the two whose inputs are those of a decoder.
        models: both.
        prompts: the caller's.
        steps: greedy tokens that follow.
        context_length: the caller's.
        seed: of random tokens.

    Raises:
        UsageError: the caller's prompts are too long, or the graph does not state its vocabulary.
    """
    graphs = [model.graph for model in decoders]
    longest = _context(models, context_length)
    width = next((size for size in map(fixed_tokens, graphs) if size is not None), None)
    reach = max(map(mask_reach, graphs))
    if prompts is not None:
        needed = max(map(len, prompts)) + steps
        if longest is not None and needed > longest:
            raise UsageError(
                f"{needed - steps} tokens and {steps} steps are more than the context of {longest} tokens; "
                "give a shorter prompt, or fewer --steps"
            )
        return Plan(prompts=prompts, steps=steps, reach=reach, context_length=longest, width=width)
    size = next((static_size(output, -1) for output in graphs[0].outputs if output.name == LOGITS), None)
    if size is None:
        raise UsageError("the vocabulary of the graph has no fixed size; give --inputs")
    if longest is not None:
        steps = min(steps, max(longest // 2, 1))
    count = _PROMPT_TOKENS if longest is None else max(min(_PROMPT_TOKENS, longest - steps), 1)
    rows = changed_rows(models[0].graph, models[1].graph).get(INPUT_IDS, [])
    drawn = _random_tokens(size, rows, seed)
    long = max(count, min(longest or 0, _MOST_TOKENS, _WORK // max(_weight_bytes(models[0]), 1)))
    others = [list(itertools.islice(drawn, length)) for length in (long, count, count, count)]
    return Plan(
        prompts=[list(itertools.islice(drawn, count))],
        steps=steps,
        others=others,
        reach=reach,
        context_length=longest,
        width=width,
    )


def _random_tokens(size: int, first: Sequence[int], seed: int) -> Iterator[int]:
    """Yield some tokens, then random ones for ever, none a second time before all others."""
    rng = np.random.default_rng(seed)
    yield from rng.permutation(np.array(first, np.int64)).tolist()
    while True:
        yield from rng.permutation(size).tolist()


def _weight_bytes(model: ir.Model) -> int:
    values = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in values if tensor is not None)


def _context(models: Sequence[ir.Model], given: int | None) -> int | None:
    """Return how long a sequence may be: the least of what is given, metadata and position tables say."""
    stated = [given]
    for model in models:
        text = model.metadata_props.get(_CONTEXT_KEY) or model.graph.metadata_props.get(_CONTEXT_KEY)
        stated.append(int(text) if text and text.isdigit() else None)
        stated += [one.bound for one in input_facts(model.graph) if one.name == POSITION_IDS]
    return min((length for length in stated if length is not None), default=None)


def _is_decoder(graph: ir.Graph) -> bool:
    """Return whether a graph turns tokens into logits over a vocabulary."""
    size = next((static_size(output, -1) for output in graph.outputs if output.name == LOGITS), None)
    fewest = _FEWEST_TOKENS if has_caches(graph) else _FEWEST_WITHOUT_CACHE
    return is_decoder(graph) and (size is None or size >= fewest)


def _fit(samples: Sequence[Sample], models: Sequence[ir.Model]) -> bool:
    """Return whether the samples have all inputs of both graphs."""
    wanted = {
        str(value.name) for model in models for value in model.graph.inputs if not value.is_initializer()
    }
    return all(wanted <= set(sample.feed) for sample in samples)


def _name(model: Path | ir.Model, role: str) -> str:
    return role if isinstance(model, ir.Model) else str(model)


def _has_tokens(samples: Sequence[Sample]) -> bool:
    return all(INPUT_IDS in sample.feed for sample in samples)


@contextmanager
def _files(reference: Path | ir.Model, candidate: Path | ir.Model) -> Iterator[tuple[Path, Path]]:
    """Yield files of both; graphs are written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, model in (("reference", reference), ("candidate", candidate)):
            path = Path(folder, f"{name}.onnx") if isinstance(model, ir.Model) else model
            if isinstance(model, ir.Model):
                ir.save(model, path, external_data=f"{path.name}.data")
            found.append(path)
        yield found[0], found[1]
