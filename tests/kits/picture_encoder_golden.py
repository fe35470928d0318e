"""Golden files of encoders of texts and pictures: the results of transformers for tiny checkpoints.

``python tests/kits/picture_encoder_golden.py``, with torch and transformers, records them again.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "checkpoints")]

from recorded_pictures import picture
from seeing_golden import pictures
from tiny_picture_encoders import CASES, PREPROCESSORS, SHAPES, TEXTS, write_picture_encoder
from vision_golden import golden_path

LABELS = ["cat", "Dog", "tea"]
HYPOTHESIS = "a photo of {}"


def answer(checkpoint: Path, case: str) -> dict[str, npt.NDArray[Any]]:
    """Return what transformers computes from texts and pictures.

    Returns:
        ``text_features`` [texts, size], ``image_features`` [pictures, size], ``pixel_values`` as the tower
        takes them, and ``scores`` [pictures, labels] of zero-shot classification.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    kind = CASES[case]["model_type"]
    name = PREPROCESSORS[kind]["image_processor_type"]
    processor = getattr(transformers, f"{name}Pil").from_pretrained(checkpoint)
    model, loading = getattr(transformers, CASES[case]["architectures"][0]).from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"the tiny checkpoint of {case} has other tensors: {loading}")
    model.eval()

    def read(texts: list[str]) -> dict[str, Any]:
        if kind == "clip":
            return dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
        # Siglip2Tokenizer writes texts in lower case and pads on the side that its file names.
        texts = [text.lower() for text in texts] if kind == "siglip2" else texts
        length = CASES[case]["text_config"]["max_position_embeddings"]
        return {
            "input_ids": tokenizer(texts, padding="max_length", max_length=length, return_tensors="pt")[
                "input_ids"
            ]
        }

    shown = dict(processor(pictures(), return_tensors="pt"))
    labels = read([HYPOTHESIS.format(label) for label in LABELS])
    with torch.inference_mode():
        texts = model.get_text_features(**read(TEXTS)).pooler_output
        images = model.get_image_features(**shown).pooler_output
        logits = model(**labels, **shown).logits_per_image
    scores = logits.softmax(-1) if kind == "clip" else logits.sigmoid()
    return {
        "text_features": texts.numpy(),
        "image_features": images.numpy(),
        "pixel_values": shown["pixel_values"].numpy(),
        "scores": scores.numpy(),
    }


def shapes(case: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors that transformers saves for a case, by name."""
    import transformers
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(**CASES[case])
    model = getattr(transformers, CASES[case]["architectures"][0])(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


PIXELS = Path(__file__).resolve().parents[1] / "corpora" / "images" / "picture_encoder_pixels.json"
SIZES = [(1, 1), (1, 40), (40, 1), (24, 24), (23, 25), (90, 50), (37, 70), (300, 200), (64, 401), (511, 13)]


def pixels() -> list[dict[str, Any]]:
    """Return the hash of what the processors on Pillow make of pictures of several sizes."""
    import transformers

    found = []
    for kind, content in PREPROCESSORS.items():
        options = {key: value for key, value in content.items() if key != "image_processor_type"}
        processor = getattr(transformers, f"{content['image_processor_type']}Pil")(**options)
        for height, width in SIZES:
            out = processor(picture(height, width), input_data_format="channels_last", return_tensors="np")
            values = np.asarray(out["pixel_values"], np.float32)[0]
            shape = out.get("spatial_shapes")
            values = values if shape is None else values[: int(np.prod(np.asarray(shape)[0]))]
            sha256 = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
            found.append({"kind": kind, "height": height, "width": width, "sha256": sha256})
    return found


def _record() -> None:
    PIXELS.write_text(json.dumps(pixels(), indent=0) + "\n")
    lines = ",\n".join(f'"{case}": {json.dumps(shapes(case))}' for case in CASES)
    SHAPES.write_text("{\n" + lines + "\n}\n")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            arrays: dict[str, Any] = dict(answer(write_picture_encoder(Path(folder), case), case))
        np.savez_compressed(golden_path(case), **arrays)
        print(case, {name: array.shape for name, array in arrays.items()})


if __name__ == "__main__":
    _record()
