"""Write tests/runtime/api/golden/vectors.npz: the vectors of sentence-transformers for tiny models.

Needs torch, transformers and sentence-transformers 6: python tools/make_vectors_golden.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits" / "checkpoints"))

from sentence_models import MODELS, PROMPTS, TEXTS, write_sentence_model

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
    return arrays


def main() -> None:
    """Write the file."""
    arrays: dict[str, Any] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            arrays |= vectors(write_sentence_model(Path(folder), name), name)
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main()
