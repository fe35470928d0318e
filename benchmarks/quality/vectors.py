"""Measure what a smaller form of an encoder costs in retrieval and in cosine similarity.

    carryall export CHECKPOINT minilm
    carryall quantize minilm/model.onnx int8.onnx --method int8-dynamic
    python benchmarks/quality/vectors.py float=minilm int8=FOLDER --json FILE

The first model is the reference. A query is the first sentence of a docstring of an installed library, and
its one relevant document is the rest of this docstring; the documents of all queries are searched. nDCG at 10
with one relevant document is 1 / log2(1 + rank), or 0 beyond rank 10 (Järvelin and Kekäläinen, 2002). The
interval of a difference is that of 10,000 bootstrap samples of the queries.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

import carryall

_SENTENCE = re.compile(r"(.{20,200}?[.])\s+(.*)", re.DOTALL)
_LEAST, _MOST = 120, 1200  # characters of a document
_SAMPLES = 10_000

Vectors = npt.NDArray[np.float32]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="+", metavar="NAME=FOLDER", help="encoders; the first is the reference"
    )
    parser.add_argument(
        "--libraries", default="numpy", help="libraries with docstrings, joined by commas [numpy]"
    )
    parser.add_argument("--most", type=int, default=2000, help="pairs at most [2000]")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    libraries = options.libraries.split(",")
    pairs = list(dict(pair for name in libraries for pair in docstrings(name)).items())[: options.most]
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    results: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "pairs": len(pairs),
        "models": {},
    }
    reference: tuple[Vectors, npt.NDArray[np.float64]] | None = None
    for given in options.models:
        name, _, folder = given.partition("=")
        encoder = carryall.TextEncoder(folder, truncate=True)
        vectors = encoder.embed([*queries, *documents])
        gains = ndcg(vectors[: len(pairs)], vectors[len(pairs) :])
        facts: dict[str, Any] = {"ndcg@10": round(float(gains.mean()), 4)}
        if reference is None:
            reference = vectors, gains
        else:
            facts |= against(reference, (vectors, gains))
        results["models"][name] = facts
        print(name, facts, file=sys.stderr)
    text = json.dumps(results, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def docstrings(library: str) -> Iterator[tuple[str, str]]:
    """Yield the first sentence and the rest of the docstrings of a library's functions and classes."""
    for module in _modules(importlib.import_module(library)):
        for name, value in sorted(vars(module).items()):
            public = not name.startswith("_") and (callable(value) or inspect.isclass(value))
            text = " ".join((inspect.getdoc(value) or "").split()) if public else ""
            # numpy repeats the signature of its functions in C in front.
            found = _SENTENCE.fullmatch(re.sub(rf"^{re.escape(name)}\([^)]*\)\s*", "", text))
            if found and len(found[2]) >= _LEAST:
                yield found[1], found[2][:_MOST]


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not info.name.rpartition(".")[2].startswith("_") and info.name.split(".")[1] not in (
            "tests",
            "f2py",
        ):
            yield importlib.import_module(info.name)


def ndcg(queries: Vectors, documents: Vectors) -> npt.NDArray[np.float64]:
    """Return the nDCG at 10 of each query, whose relevant document is the one at its place."""
    scores = queries @ documents.T
    ranks = (scores > np.diag(scores)[:, None]).sum(1) + 1
    return np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)


def against(
    reference: tuple[Vectors, npt.NDArray[np.float64]], other: tuple[Vectors, npt.NDArray[np.float64]]
) -> dict[str, Any]:
    """Return the difference of nDCG with its interval, and the cosine similarities of the vectors."""
    (first, gains), (second, others) = reference, other
    difference = others - gains
    rng = np.random.default_rng(0)
    means = [difference[rng.integers(len(difference), size=len(difference))].mean() for _ in range(_SAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(1) / lengths
    return {
        "difference": round(float(difference.mean()), 4),
        "interval of 95 %": [round(float(low), 4), round(float(high), 4)],
        "mean cosine": round(float(cosines.mean()), 4),
        "least cosine": round(float(cosines.min()), 4),
    }


if __name__ == "__main__":
    main()
