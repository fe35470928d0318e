"""Write tests/exporter/golden/encoders.npz: the results of transformers for every case of an encoder.

Writes the shapes of the tensors that transformers saves for the recorded cases too.
Needs torch and transformers: python tools/make_encoder_golden.py
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

from tiny_encoders import (
    CASES,
    CLASSIFIER,
    MASKED,
    RECORDED,
    TOKENS,
    encoder_config,
    tokens,
    write_case,
)

SHAPES = Path(__file__).parent.parent / "tests" / "kits" / "checkpoints" / "encoder_shapes.json"
GOLDEN = Path(__file__).parent.parent / "tests" / "exporter" / "golden" / "encoders.npz"


def shapes(case: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors that transformers saves for a case, by name."""
    import transformers
    from safetensors import safe_open

    model_type, head, changes = RECORDED[case]
    config = encoder_config(model_type, head, changes)
    model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


def answer(folder: Path, head: str) -> dict[str, Any]:
    """Return ``states`` [3, 11, hidden], 0 for padding, and ``logits`` of a model with a head, the same."""
    import torch
    import transformers

    loads = {
        CLASSIFIER: transformers.AutoModelForSequenceClassification,
        TOKENS: transformers.AutoModelForTokenClassification,
        MASKED: transformers.AutoModelForMaskedLM,
    }
    config = transformers.AutoConfig.from_pretrained(folder)
    load = getattr(transformers, config.architectures[0]) if config.model_type in ("t5", "mt5") else None
    load = load or loads.get(head, transformers.AutoModel)
    model, found = load.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in found["missing_keys"] if not name.startswith("pooler.")]
    if missing or found["unexpected_keys"] or found["mismatched_keys"]:
        raise SystemExit(f"{folder}: the tensors are not those of the architecture: {found}")
    ids, mask, types = (torch.tensor(array) for array in tokens())
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = types
    with torch.inference_mode():
        out = model.eval()(**inputs)
        states = (model.base_model(**inputs) if head in loads else out).last_hidden_state
    results = {"states": (states * mask[:, :, None]).numpy()}
    if head not in loads:
        return results
    logits = out.logits if head == CLASSIFIER else out.logits * mask[:, :, None]
    return results | {"logits": logits.numpy()}


def main() -> None:
    """Write the files."""
    SHAPES.write_text(
        "{\n" + ",\n".join(f'"{case}": {json.dumps(shapes(case))}' for case in RECORDED) + "\n}\n"
    )
    found: dict[str, Any] = {}
    for case, (_, head, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_case(Path(folder), case)
            found |= {f"{case}/{name}": array for name, array in answer(path, head).items()}
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
