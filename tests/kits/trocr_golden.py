"""Golden file of TrOCR: the results of transformers for tiny checkpoints and two pictures.

``python tests/kits/trocr_golden.py``, with torch and transformers, records it again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "checkpoints")]

from recorded_pictures import picture
from tiny_trocr import CASES, START, write_trocr

Array = npt.NDArray[Any]
FOLDER = Path(__file__).resolve().parents[1] / "exporter" / "golden"
SEED = 3
SIZES = ((30, 90), (24, 24))  # height and width
NEW_TOKENS = 20


def golden_path(case: str) -> Path:
    """Return the file of a case."""
    return FOLDER / f"trocr-{case}.npz"


def pictures() -> list[npt.NDArray[np.uint8]]:
    """Return the pictures, uint8 [height, width, 3]."""
    return [picture(height, width) for height, width in SIZES]


def transformers_answer(checkpoint: Path, case: str) -> dict[str, Array]:
    """Return what transformers makes of the pictures.

    Returns:
        ``pixels`` [2, 3, height, width]; ``states`` [2, rows, width], as the decoder attends to them;
        ``logits`` [2, tokens, vocab] of ``tokens``, which are the first token and those chosen greedily;
        ``margin``, the smallest difference of the best two logits.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = {"vit": "ViT", "deit": "DeiT"}[CASES[case][0]["model_type"]]
    processor = getattr(transformers, f"{name}ImageProcessorPil").from_pretrained(checkpoint)
    model, loading = transformers.VisionEncoderDecoderModel.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"the tiny checkpoint of {case} has other tensors: {loading}")
    decoder = model.eval().decoder.model.decoder
    if (sinusoids := getattr(decoder.embed_positions, "weights", None)) is not None:
        # Loading leaves this table without values, since it is no tensor of the checkpoint.
        decoder.embed_positions.weights = decoder.embed_positions.get_embedding(
            *sinusoids.shape, decoder.padding_idx
        )
    pixels = processor(pictures(), return_tensors="pt")["pixel_values"]
    tokens, margins = torch.full((2, 1), START), []
    with torch.inference_mode():
        states = model.encoder(pixels).last_hidden_state
        if hasattr(model, "enc_to_dec_proj"):
            states = model.enc_to_dec_proj(states)
        for _ in range(NEW_TOKENS):
            logits = model(pixel_values=pixels, decoder_input_ids=tokens, use_cache=False).logits
            best = logits[:, -1].topk(2)
            margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
            tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
    return {
        "pixels": pixels.numpy(),
        "states": states.numpy(),
        "tokens": tokens.numpy(),
        "logits": logits.numpy(),
        "margin": np.array(min(margins)),
    }


def main() -> None:
    """Record the files."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            answer = transformers_answer(write_trocr(Path(folder), case, SEED), case)
        print(f"{case}: smallest margin {float(answer['margin']):.1e}", answer["tokens"].tolist())
        stored: dict[str, Any] = {name: value for name, value in answer.items() if name != "margin"}
        np.savez_compressed(golden_path(case), **stored)


if __name__ == "__main__":
    main()
