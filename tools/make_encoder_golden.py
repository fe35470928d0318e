"""Write tests/exporter/golden/encoders.npz: the results of transformers for every case of an encoder.

Needs torch and transformers: python tools/make_encoder_golden.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits" / "checkpoints"))

from tiny_encoders import CASES, CLASSIFIER, tokens, write_tiny_encoder

GOLDEN = Path(__file__).parent.parent / "tests" / "exporter" / "golden" / "encoders.npz"


def answer(folder: Path, head: str) -> dict[str, Any]:
    """Return ``states`` [3, 11, hidden], 0 for padding, and ``logits`` [3, labels] of a classifier."""
    import torch
    import transformers

    load = transformers.AutoModelForSequenceClassification if head == CLASSIFIER else transformers.AutoModel
    model, found = load.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"{folder}: the tensors are not those of the architecture: {found}")
    ids, mask, types = (torch.tensor(array) for array in tokens())
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = types
    with torch.inference_mode():
        out = model.eval()(**inputs, output_hidden_states=head == CLASSIFIER)
        states = model.base_model(**inputs).last_hidden_state if head == CLASSIFIER else out.last_hidden_state
    results = {"states": (states * mask[:, :, None]).numpy()}
    return results | ({"logits": out.logits.numpy()} if head == CLASSIFIER else {})


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for case, (model_type, head, changes) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_encoder(Path(folder), model_type, head, **changes)
            found |= {f"{case}/{name}": array for name, array in answer(path, head).items()}
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
