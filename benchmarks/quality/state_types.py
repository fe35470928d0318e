"""What states of bfloat16 cost: KL divergence from float32 states, and recall, on the trained recall network.

    python benchmarks/quality/state_types.py [--between 150,1000,2000]

The network and its texts are those of ``tests/runtime/api/test_recall.py``: values of six keys, other tokens
behind them (``--between``), then a key, whose value is the answer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS / "kits"))
from recall_texts import recall_text  # noqa: E402

from carryall import LLM  # noqa: E402
from carryall.providers.base import Row  # noqa: E402

PAIRS, TEXTS = 6, 8


def answers(kind: str, between: int) -> tuple[npt.NDArray[np.float64], float, int]:
    """Return the log-probabilities of each answer, the share of right ones, and the bytes of a state."""
    found, right = [], []
    options = {"state_cache": kind}
    with LLM(TESTS / "corpora" / "recall_hybrid", max_slots=1, provider_options=options) as llm:
        runner = llm.engine.runner
        for text, values in (recall_text(seed, PAIRS, between) for seed in range(TEXTS)):
            for key, value in values.items():
                logits = runner.forward([Row(0, np.array([*text, key], np.int64), 0)])[0][0].astype(
                    np.float64
                )
                runner.release(0)
                found.append(logits - np.logaddexp.reduce(logits))
                right.append(int(logits.argmax()) == value)
        return np.array(found), float(np.mean(right)), llm.engine.info.state_bytes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--between", default="150,1000,2000", help="tokens between the values and the question"
    )
    print("between  bytes of a state  right          mean KL    largest KL")
    for between in map(int, parser.parse_args().between.split(",")):
        (p, whole, size), (q, halved, small) = (answers(kind, between) for kind in ("float32", "bfloat16"))
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        sizes, shares = f"{size} -> {small}", f"{whole:.3f} -> {halved:.3f}"
        print(f"{between:>7}  {sizes:>16}  {shares}  {kl.mean():.2g}  {kl.max():.2g}")


if __name__ == "__main__":
    main()
