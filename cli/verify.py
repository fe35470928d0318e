"""``carryall verify``, and the check behind ``carryall optimize --verify``."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from ..exporter.package import TOKENIZER_FILE
from ..exporter.signature import DecoderSignature
from ..graph_opt.verify import Comparison, compare
from ..runtime.errors import UsageError, VerificationError
from ..runtime.model_source import locate_model
from .models import graph_file
from .options import json_option, print_json

PROMPT_TOKENS = 32
MAX_KL = 5e-3  # above what kernels with 8-bit activations cost, below what a wrong graph does


@click.command("verify")
@click.argument("a")
@click.argument("b")
@click.option("--prompt", help="Text to compare on, by A's tokenizer. Default: random tokens.")
@click.option(
    "--steps", default=16, show_default=True, type=click.IntRange(1), help="Tokens after the prompt."
)
@click.option("--max-kl", default=MAX_KL, show_default=True, help="The bar: largest KL divergence, in nats.")
@json_option
def command(a: str, b: str, prompt: str | None, steps: int, max_kl: float, as_json: bool) -> None:
    """Check that two models give the same results.

    A and B run on the same tokens, on the CPU: a prompt, then the greedy continuation of A. The logits are
    compared after every token. Exit code 0 if the next-token distributions of B stay within --max-kl of
    A's, else 1. A quantized model differs from its float original by design: give such a pair a wider bar.

    \b
    Examples:
        carryall verify demo demo-cpu
        carryall verify demo demo-int4 --max-kl 0.5 --prompt "def main():"
    """
    tokens = None if prompt is None else _tokenize(locate_model(a), prompt)
    with tempfile.TemporaryDirectory() as scratch:
        first, second = graph_file(a, Path(scratch, "a")), graph_file(b, Path(scratch, "b"))
        found = compare_files(first, second, tokens, steps=steps)
    passed = found.kl <= max_kl
    if as_json:
        print_json({**dataclasses.asdict(found), "bar": max_kl, "passed": passed})
    else:
        click.echo(describe(found))
    if not passed:
        raise VerificationError(too_different(found, b, a, max_kl))


def compare_files(a: Path, b: Path, tokens: Sequence[int] | None = None, *, steps: int = 16) -> Comparison:
    """Compare two decoder graphs on tokens, by default on random ones.

    Raises:
        GraphError: one of them is no decoder.
        UsageError: their vocabularies differ.
    """
    sizes = [DecoderSignature.of(ir.load(path)).vocab_size for path in (a, b)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"the models have different vocabularies: {sizes[0]} and {sizes[1]} tokens")
    if tokens is None:
        tokens = np.random.default_rng(0).integers(0, sizes[0], PROMPT_TOKENS).tolist()
    return compare(a, b, tokens, steps=steps)


def describe(found: Comparison) -> str:
    """Return a comparison in one line."""
    return (
        f"greedy tokens equal: {found.greedy_equal} of {found.steps}; KL {found.kl:.2g} at most, "
        f"{found.mean_kl:.2g} on average; logits differ by {found.max_abs:.2g} at most"
    )


def too_different(found: Comparison, changed: str, original: str, max_kl: float) -> str:
    """Return the message for a comparison that misses its bar."""
    return f"{changed} differs from {original}: KL {found.kl:.2g} is above the bar {max_kl:g} (--max-kl)"


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
