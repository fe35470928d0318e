"""What dropping old KV costs: perplexity of a portable package with a bounded cache, by criterion.

    python benchmarks/squeezed_kv.py PACKAGE exporter/demo/pycoder/heldout.txt --keep 128 --keep 64

Windows of text are read in pieces; after each, every layer and head keeps ``--keep`` tokens. Positions go
on, and keys keep their rotation. The perplexity is that of each window's second half.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from tokenizers import Tokenizer

SINKS = 4
PIECE = 16

Floats = npt.NDArray[np.float32]


def scores(keys: Floats, criterion: str) -> npt.NDArray[np.float64]:
    """How much each token is worth keeping, [batch, heads, tokens].

    ``small-keys`` is L2-norm KV compression (Devoto et al., arXiv:2406.11430), ``large-keys`` its opposite.
    """
    tokens = keys.shape[2]
    norms = np.linalg.norm(keys, axis=-1).astype(np.float64)
    match criterion:
        case "recent":
            return np.zeros(norms.shape) + np.arange(tokens)
        case "small-keys":
            return -norms
        case "large-keys":
            return norms
        case "random":
            return np.zeros(norms.shape) + np.random.default_rng(0).random(tokens)
    raise ValueError(criterion)


def kept(keys: Floats, keep: int, criterion: str) -> npt.NDArray[np.int64]:
    """Indices [batch, heads, keep, 1]: the sinks, the recent half, and the best of the others."""
    worth = scores(keys, criterion)
    worth[:, :, :SINKS] = np.inf
    worth[:, :, keys.shape[2] - keep // 2 :] = np.inf
    best = np.argsort(-worth, axis=2, kind="stable")[:, :, :keep]
    return np.sort(best, axis=2)[..., None]


def perplexity(session: ort.InferenceSession, windows: npt.NDArray[np.int64], keep: int, by: str) -> float:
    """Perplexity of the second halves of ``windows`` [batch, tokens]; ``keep`` 0 keeps all."""
    batch, width = windows.shape
    inputs = [i for i in session.get_inputs() if i.name.startswith("past_key_values")]
    names = [output.name for output in session.get_outputs()]
    past = {i.name: np.zeros((batch, i.shape[1], 0, i.shape[3]), np.float32) for i in inputs}
    losses = []
    for start in range(0, width - 1, PIECE):
        tokens = windows[:, start : start + PIECE]
        held = next(iter(past.values())).shape[2]
        positions = np.tile(np.arange(start, start + tokens.shape[1]), (batch, 1))
        mask = np.ones((batch, held + tokens.shape[1]), np.int64)
        feeds = past | {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        results = dict(zip(names, session.run(None, feeds), strict=True))
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
        if start >= width // 2:
            losses.append(_losses(results["logits"], windows[:, start + 1 : start + 1 + PIECE]))
        if keep and held + tokens.shape[1] > keep:
            for key in [name for name in past if name.endswith(".key")]:
                index = kept(past[key], keep, by)
                for name in (key, key.removesuffix("key") + "value"):
                    past[name] = np.take_along_axis(past[name], index, axis=2)
    return float(np.exp(np.concatenate(losses).mean()))


def _losses(logits: Floats, targets: npt.NDArray[np.int64]) -> Floats:
    logits = logits[:, : targets.shape[1]]
    logits = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (np.log(np.exp(logits).sum(-1)) - chosen).ravel()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--keep", type=int, action="append", required=True)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.package / "tokenizer.json"))
    ids = np.array(tokenizer.encode(options.text.read_text()).ids, np.int64)
    windows = ids[: options.windows * options.width].reshape(options.windows, options.width)
    session = ort.InferenceSession(options.package / "model.onnx", providers=["CPUExecutionProvider"])
    print(f"all kept: {perplexity(session, windows, 0, 'recent'):.3f}")
    for keep in options.keep:
        for by in ("recent", "large-keys", "random", "small-keys"):
            print(f"{keep} kept, {by}: {perplexity(session, windows, keep, by):.3f}", flush=True)


if __name__ == "__main__":
    main()
