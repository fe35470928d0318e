"""Write the vectors of sentence-transformers, and the classes of transformers, for tiny models.

They go to vectors.npz and classes.json in tests/runtime/api/golden.
Needs torch, transformers and sentence-transformers 6: python tools/make_vectors_golden.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits" / "checkpoints"))

from sentence_models import MODELS, PROMPTS, TEXTS, write_classifier, write_sentence_model

GOLDEN = Path(__file__).parent.parent / "tests" / "runtime" / "api" / "golden" / "vectors.npz"


def vectors(folder: Path, name: str) -> dict[str, Any]:
    """Return the vectors of the texts by prompt; those of tokens are joined."""
    import sentence_transformers as library

    classes = {
        "dense": library.SentenceTransformer,
        "sparse": library.SparseEncoder,
        "multi": library.MultiVectorEncoder,
    }
    kind = MODELS[name].kind
    encoder = classes[kind](str(folder), device="cpu", local_files_only=True)
    arrays = {}
    for prompt in (None, *PROMPTS):
        if kind == "multi":
            encode = encoder.encode_query if prompt == "query" else encoder.encode_document
            rows = encode(TEXTS, prompt_name=prompt, convert_to_numpy=True)
            array = np.concatenate(rows)
        elif kind == "sparse":
            array = encoder.encode(TEXTS, prompt_name=prompt, convert_to_sparse_tensor=False).numpy()
        else:
            array = encoder.encode(TEXTS, prompt_name=prompt)
        arrays[f"{name}/{prompt or ''}"] = array
    if kind == "dense":
        first = arrays[f"{name}/query"]
        arrays[f"{name}/similarity"] = encoder.similarity(first, first).numpy()
        arrays[f"{name}/cut"] = encoder.encode(TEXTS, prompt_name="query", truncate_dim=4)
    else:
        queries, documents = encoder.encode_query(TEXTS), encoder.encode_document(TEXTS)
        arrays[f"{name}/similarity"] = encoder.similarity(queries, documents).numpy()
    return arrays


def classes(folder: Path) -> dict[str, Any]:
    """Return the answers of transformers' pipelines."""
    from transformers import pipeline

    names = str(write_classifier(folder / "names", "names"))
    answers: dict[str, Any] = {}
    for way in ("none", "simple", "first", "average", "max"):
        finder = pipeline("token-classification", model=names, aggregation_strategy=way, device="cpu")
        found = [finder(text) for text in TEXTS]
        answers[way] = [
            [
                {
                    "label": part.get("entity", part.get("entity_group")),
                    "score": float(part["score"]),
                    "start": int(part["start"]),
                    "end": int(part["end"]),
                }
                for part in parts
            ]
            for parts in found
        ]
    inference = str(write_classifier(folder / "inference", "inference"))
    zero_shot = pipeline("zero-shot-classification", model=inference, device="cpu")
    for several in (False, True):
        results = zero_shot(TEXTS, ["sport", "art"], hypothesis_template="is {}", multi_label=several)
        key = "independent" if several else "exclusive"
        answers[key] = [dict(zip(result["labels"], result["scores"], strict=True)) for result in results]
    classify = pipeline("text-classification", model=inference, top_k=None, device="cpu")
    answers["texts"] = classify(TEXTS)
    answers["pair"] = classify({"text": TEXTS[0], "text_pair": TEXTS[1]})
    return answers


def main() -> None:
    """Write the files."""
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.with_name("classes.json").write_text(json.dumps(classes(Path(folder)), indent=1) + "\n")
    arrays: dict[str, Any] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            arrays |= vectors(write_sentence_model(Path(folder), name), name)
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main()
