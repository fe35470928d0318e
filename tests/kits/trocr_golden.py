"""Golden files of TrOCR and Donut: the results of transformers for tiny checkpoints and two pictures.

``python tests/kits/trocr_golden.py``, with torch and transformers, records it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "checkpoints")]

from recorded_pictures import picture
from tiny_trocr import CASES, write_trocr

Array = npt.NDArray[Any]
FOLDER = Path(__file__).resolve().parents[1] / "exporter" / "golden"
SEED = 3
SIZES = ((30, 90), (24, 24))  # height and width
NEW_TOKENS = 20


# Height and width of pictures whose pages are recorded.
PAGES = ((30, 90), (90, 30), (24, 24), (7, 40), (200, 33), (33, 200), (640, 480), (5, 60), (500, 499))
PAGES_PATH = FOLDER.parents[1] / "corpora" / "images" / "donut_pages.json"
# Tasks and the beginnings of answers, of which a tiny random model is given some.
PROMPTS = ("<s_cord-v2>", "<s_cord-v2><s_name>Tea</s_name><s_price>")
PROMPTED_PATH = FOLDER / "donut-prompted.json"
BEAMS, BEAM_TOKENS, BEAM_CASES = 3, 8, ("vit", "donut")
BEAMS_PATH = FOLDER / "trocr-beams.json"
DONUTS = ("donut", "donut-odd")


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
    name = {"vit": "ViT", "deit": "DeiT", "donut-swin": "Donut"}[CASES[case][0]["model_type"]]
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
    start = CASES[case][1]["decoder_start_token_id"]
    tokens, margins = torch.full((2, 1), start), []
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


def page_digests(case: str) -> dict[str, str]:
    """Return by height and width the SHA-256 of a picture's page, float32 [3, height, width]."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_trocr(Path(folder), case)
        processor = transformers.DonutImageProcessorPil.from_pretrained(checkpoint)
    return {
        f"{height}x{width}": hashlib.sha256(
            processor(picture(height, width), return_tensors="np")["pixel_values"][0].tobytes()
        ).hexdigest()
        for height, width in PAGES
    }


def beams_of(case: str) -> dict[str, Any]:
    """Return what a search of transformers with ``BEAMS`` beams writes down of the second picture.

    Returns:
        ``tokens``, those of the best beam without the first token; ``logprob``, its sum of log-probabilities.
    """
    import torch
    import transformers

    name = {"vit": "ViT", "deit": "DeiT", "donut-swin": "Donut"}[CASES[case][0]["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_trocr(Path(folder), case, SEED)
        processor = getattr(transformers, f"{name}ImageProcessorPil").from_pretrained(checkpoint)
        model = transformers.VisionEncoderDecoderModel.from_pretrained(
            checkpoint, attn_implementation="eager"
        )
    pixels = processor(pictures()[1:], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        found = model.eval().generate(
            pixels,
            decoder_input_ids=torch.tensor([[CASES[case][1]["decoder_start_token_id"]]]),
            num_beams=BEAMS,
            do_sample=False,
            max_new_tokens=BEAM_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = found.sequences[0, 1:].tolist()
    # The score of a beam is its sum of log-probabilities over its length.
    return {"tokens": tokens, "logprob": float(found.sequences_scores[0]) * len(tokens)}


def prompted_answer(checkpoint: Path, prompt: str) -> dict[str, Any]:
    """Return what transformers generates greedily of the second picture behind a prompt.

    Returns:
        ``prompt`` and ``tokens``, the ids of the prompt and those generated; ``json``, what
        ``DonutProcessor.token2json`` makes of them all without the name of the task, as its examples do.
    """
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    image_processor = transformers.DonutImageProcessorPil.from_pretrained(checkpoint)
    model = transformers.VisionEncoderDecoderModel.from_pretrained(checkpoint, attn_implementation="eager")
    pixels = image_processor(pictures()[1:], return_tensors="pt")["pixel_values"]
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    sequence = (
        model.eval()
        .generate(
            pixels,
            decoder_input_ids=ids,
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )[0]
        .tolist()
    )
    processor = transformers.DonutProcessor(image_processor, tokenizer)
    text = re.sub(r"<.*?>", "", tokenizer.decode(sequence), count=1).strip()
    count = ids.shape[1]
    return {
        "text": prompt,
        "prompt": sequence[:count],
        "tokens": sequence[count:],
        "json": processor.token2json(text),
    }


def main() -> None:
    """Record the files."""
    beams = {case: beams_of(case) for case in BEAM_CASES}
    BEAMS_PATH.write_text(json.dumps(beams, indent=1) + "\n", encoding="utf-8")
    pages = {case: page_digests(case) for case in DONUTS}
    PAGES_PATH.write_text(json.dumps(pages, indent=1) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_trocr(Path(folder), "donut", SEED)
        prompted = [prompted_answer(checkpoint, prompt) for prompt in PROMPTS]
    PROMPTED_PATH.write_text(json.dumps(prompted, indent=1) + "\n", encoding="utf-8")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            answer = transformers_answer(write_trocr(Path(folder), case, SEED), case)
        print(f"{case}: smallest margin {float(answer['margin']):.1e}", answer["tokens"].tolist())
        stored: dict[str, Any] = {name: value for name, value in answer.items() if name != "margin"}
        np.savez_compressed(golden_path(case), **stored)


if __name__ == "__main__":
    main()
