"""How far each engine's predictions are from those of the float32 model in PyTorch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from environments import run
from measures import Contestant, Figure
from models import WORKERS

from carryall.runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
TOKENS = 512


def fidelity(contestants: Sequence[Contestant], checkpoint: Path, torch: Path) -> Iterator[Figure]:
    """Yield the mean KL divergence to the float32 model and the share of equal first tokens.

    Args:
        contestants: the engines.
        checkpoint: Hugging Face folder with the float32 model and the tokenizer.
        torch: interpreter of an environment with torch and transformers.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.npy")
        ids = Tokenizer(checkpoint).encode(TEXT.read_text(encoding="utf-8"))
        np.save(tokens, np.array(ids[:TOKENS], np.int64))
        reference = _log_probabilities(torch, "transformers", str(checkpoint), tokens)
        for one in contestants:
            print(f"fidelity of {one.name}", file=sys.stderr, flush=True)
            found = _log_probabilities(one.python, one.logits, one.model.split(",")[0], tokens)
            divergence = (np.exp(reference) * (reference - found)).sum(axis=-1).mean()
            equal = (reference.argmax(axis=-1) == found.argmax(axis=-1)).mean()
            yield Figure("KL divergence to float32", one.name, "nats", float(divergence))
            yield Figure("equal first tokens", one.name, "%", float(100 * equal))


def _log_probabilities(python: Path, engine: str, model: str, tokens: Path) -> np.ndarray:
    """Return float64 [tokens, vocabulary]."""
    target = tokens.with_name(f"{engine}.npy")
    run([str(python), str(WORKERS / "logits.py"), engine, model, str(tokens), str(target)])
    logits = np.load(target).astype(np.float64)
    target.unlink()
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
