"""Measure the perplexity of a text longer than the context under several policies of context shift.

    python benchmarks/engine/endless.py demo exporter/demo/pycoder/heldout.txt --context 256 --tokens 20000

Whenever the context is full, a policy decides which tokens stay: none, the recent half, or the first tokens
and the recent half (``context_shift=True``). The last row uses the model's whole context. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from carryall.providers.base import Row, Runner
from carryall.runtime.models.loading import load_model


def losses(runner: Runner, tokens: np.ndarray, context: int, sinks: int, recent: int) -> np.ndarray:
    """Return the negative log-likelihoods [n - 1] of all tokens except the first.

    When ``context`` is full, the first ``sinks`` and the last ``recent`` tokens stay.
    """
    found, known, position = [], tokens[:0], 0
    while position < len(tokens) - 1:
        new = tokens[position : position + context - len(known)]
        (logits,) = runner.forward([Row(0, np.concatenate([known, new]), 0, num_logits=len(new))])
        targets = tokens[position + 1 : position + 1 + len(new)]
        scores = logits[: len(targets)].astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        found.append(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(targets)), targets])
        position += len(new)
        held = np.concatenate([known, new])
        known = np.concatenate([held[:sinks], held[len(held) - recent :]])
    return np.concatenate(found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--sinks", type=int, default=4)
    options = parser.parse_args()
    loaded = load_model(options.model, max_slots=1)
    if loaded.tokenizer is None:
        raise SystemExit("the model has no tokenizer")
    text = options.text.read_text(encoding="utf-8")
    tokens = np.array(loaded.tokenizer.encode(text)[: options.tokens], np.int64)
    context, whole = options.context, loaded.runner.info.context_length
    policies = {
        f"start again, context {context}": (context, 0, 0),
        f"the recent half, context {context}": (context, 0, context // 2),
        f"{options.sinks} sinks and the recent half, context {context}": (
            context,
            options.sinks,
            (context - options.sinks) // 2,
        ),
        f"the recent half, context {whole}": (whole, 0, whole // 2),
    }
    print("| what stays | perplexity |\n| --- | ---: |")
    for name, policy in policies.items():
        print(f"| {name} | {np.exp(losses(loaded.runner, tokens, *policy).mean()):.3f} |", flush=True)


if __name__ == "__main__":
    main()
