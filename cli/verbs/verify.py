"""``carryall verify``."""

from __future__ import annotations

import dataclasses
import tempfile
import zipfile
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ...errors import UsageError, VerificationError
from ...exporter.package import TOKENIZER_FILE
from ...graph_opt.compare.comparison import Bar, Comparison
from ...graph_opt.compare.runners import is_decoder
from ...graph_opt.compare.verify import compare_feed, compare_graphs, compare_prompts
from ...graph_opt.graph.load import load_model
from ...runtime.models.model_source import locate_model
from ..models import graph_file
from ..options import json_option, print_json

MAX_KL = 5e-3  # above what kernels with 8-bit activations cost, below what a wrong graph does
MAX_ERROR = 1e-3  # above what another order of sums costs in float32


@click.command("verify")
@click.argument("a")
@click.argument("b")
@click.option("--prompt", help="Text to compare on, by A's tokenizer. Default: random tokens.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Tensors to compare on, by input name: an .npz file. For decoders, input_ids is enough.",
)
@click.option(
    "--steps", default=16, show_default=True, type=click.IntRange(1), help="Tokens after the prompt."
)
@click.option("--max-kl", default=MAX_KL, show_default=True, help="The bar: largest KL divergence, in nats.")
@click.option(
    "--max-error",
    default=MAX_ERROR,
    show_default=True,
    help="The bar for graphs without logits: the largest relative error of an output.",
)
@json_option
def command(
    a: str,
    b: str,
    prompt: str | None,
    inputs: Path | None,
    steps: int,
    max_kl: float,
    max_error: float,
    as_json: bool,
) -> None:
    """Check that two models give the same results.

    A and B run on the same tokens, on the CPU: a prompt, then the greedy continuation of A; one may be
    portable and the other lowered. The logits are compared after every token. Exit code 0 if the next-token
    distributions of B stay within --max-kl of A's, 1 if not, 2 for wrong use. A quantized model differs from
    its float original by design: give such a pair a wider bar. Graphs that are no decoders run on random
    tensors, or on those of --inputs, and each of their outputs must stay within --max-error.

    \b
    Examples:
        carryall verify demo demo-cpu
        carryall verify demo demo-int4 --max-kl 0.5 --prompt "def main():"
        carryall verify net.onnx net-small.onnx --inputs batch.npz
    """
    if prompt is not None and inputs is not None:
        raise UsageError("--prompt and --inputs exclude each other")
    with tempfile.TemporaryDirectory() as scratch:
        first, second = graph_file(a, Path(scratch, "a")), graph_file(b, Path(scratch, "b"))
        found: Comparison
        if prompt is not None:
            found = compare_prompts(first, second, [_tokenize(locate_model(a), prompt)], steps=steps)
        elif inputs is not None:
            found = _compare_on(inputs, first, second, steps)
        else:
            found = compare_graphs(first, second, steps=steps)
    bar = Bar(max_kl, max_error)
    reason = found.misses(bar)
    if as_json:
        print_json({**dataclasses.asdict(found), "bar": dataclasses.asdict(bar), "passed": reason is None})
    else:
        click.echo(str(found))
    if reason is not None:
        raise VerificationError(f"{b} differs from {a}: {reason}")


def _compare_on(inputs: Path, a: Path, b: Path, steps: int) -> Comparison:
    """Compare on the tensors of a file: as they are where both graphs know them, else by their tokens."""
    try:
        with np.load(inputs) as archive:
            feed = {name: archive[name] for name in archive.files}
    except (ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{inputs} is no .npz file of tensors: {error}") from error
    graphs = [load_model(model).graph for model in (a, b)]
    wanted = {str(value.name) for graph in graphs for value in graph.inputs if not value.is_initializer()}
    if not wanted <= set(feed) and "input_ids" in feed and all(map(is_decoder, graphs)):
        return compare_prompts(a, b, _rows(feed), steps=steps)
    return compare_feed(a, b, feed)


def _rows(feed: dict[str, npt.NDArray[np.int64]]) -> list[list[int]]:
    """Return the prompts of a batch, without their padding."""
    ids = np.atleast_2d(feed["input_ids"])
    real = np.atleast_2d(feed.get("attention_mask", np.ones_like(ids))) != 0
    if real.shape != ids.shape or not real.any(axis=1).all():
        raise UsageError("attention_mask must have the shape of input_ids, and a token in every row")
    return [row[kept].tolist() for row, kept in zip(ids, real, strict=True)]


def _tokenize(model: Path, text: str) -> list[int]:
    path = model / TOKENIZER_FILE
    if not path.is_file():
        raise UsageError(
            f"--prompt needs a tokenizer, and {model} has none; leave --prompt out for random tokens"
        )
    tokens: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    if not tokens:
        raise UsageError("--prompt is empty")
    return tokens
