"""Golden file of models that see: the results of transformers for a tiny checkpoint, a picture and a prompt.

``python tests/kits/vision_golden.py``, with torch and transformers, records it again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FAMILIES = ("smolvlm", "idefics3")
HEIGHT, WIDTH = 50, 90
NEW_TOKENS = 16
BEFORE, AFTER = "<|im_start|>User:", "What is it?<end_of_utterance>\nAssistant:"


def golden_path(family: str) -> Path:
    """Return the path of a family's golden file."""
    return Path(__file__).resolve().parents[1] / "corpora" / "images" / f"{family}.npz"


def picture(height: int = HEIGHT, width: int = WIDTH, shift: int = 0) -> npt.NDArray[np.uint8]:
    """Return a picture of smooth and hard edges, uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 5 + shift) % 256, (y * 7 + x) % 256, ((x // 8 + y // 6) % 2) * 220]
    return np.stack(channels, -1).astype(np.uint8)


def transformers_answer(checkpoint: Path, pixels: npt.NDArray[np.uint8]) -> dict[str, Array]:
    """Return what transformers computes from a picture and a question about it.

    Returns:
        ``token_ids`` [tokens] of the prompt, ``image_states`` [rows, hidden], ``logits`` [vocabulary] behind
        the prompt, and ``tokens`` [new], chosen greedily.
    """
    import torch
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    processor = Idefics3ImageProcessorPil.from_pretrained(checkpoint)
    inputs = processor.preprocess(pixels, return_row_col_info=True)
    values = torch.tensor(np.asarray(inputs["pixel_values"]))
    mask = torch.tensor(np.asarray(inputs["pixel_attention_mask"]))
    text = get_image_prompt_string(
        inputs["rows"][0][0],
        inputs["cols"][0][0],
        4,
        fake_token_around_image="<fake_token_around_image>",  # noqa: S106
        image_token="<image>",  # noqa: S106
        global_image_token="<global-img>",  # noqa: S106
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ids = tokenizer(BEFORE + text + AFTER, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens: list[int] = []
    with torch.inference_mode():
        states = model.model.get_image_features(values, mask).pooler_output
        known = ids
        logits = []
        for _ in range(NEW_TOKENS):
            out = model(input_ids=known, pixel_values=values, pixel_attention_mask=mask, use_cache=False)
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
            known = torch.cat([known, torch.tensor([[tokens[-1]]])], dim=1)
    return {
        "token_ids": ids[0].numpy(),
        "image_states": torch.cat(list(states)).numpy(),
        "logits": logits[0],
        "tokens": np.array(tokens),
    }


def _record() -> None:
    from tiny_vlms import write_vlm

    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            answer = transformers_answer(write_vlm(Path(folder), family), picture())
        arrays: dict[str, Any] = dict(answer)
        np.savez_compressed(golden_path(family), **arrays)
        print(family, {name: array.shape for name, array in answer.items()}, answer["tokens"])


if __name__ == "__main__":
    _record()
