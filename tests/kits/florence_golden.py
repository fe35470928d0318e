"""Golden files of Florence-2: results of transformers for a tiny checkpoint, and what it reads in answers.

``python tests/kits/florence_golden.py``, with torch and transformers, records them again.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "checkpoints")]

from recorded_pictures import picture
from tiny_florence import write_florence

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "exporter" / "golden" / "florence2.npz"
LOCATIONS = TESTS / "corpora" / "tags" / "florence2.json"
SEED, NEW_TOKENS, SIZE = 3, 20, (30, 90)
TASKS = ("<OD>", "<REGION_TO_OCR><loc_1><loc_2><loc_9><loc_11>")
# The rules of published checkpoints, and some of their own.
RULES: dict[str, Any] = {
    "ocr": {"AREA_THRESHOLD": 0.01},
    "phrase_grounding": {"banned_grounding_tokens": ["it", "the image"]},
    "pure_text": {},
    "description_with_bboxes": {},
    "description_with_bboxes_or_polygons": {},
    "polygons": {},
    "bboxes": {},
}
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_PIECES = (
    "car", "it", " the image ", "é", "<loc_0>", "<loc_99>", "<loc_500>", "<loc_999>",
    "<loc_3><loc_5><loc_700><loc_900>",
    "<poly>", "</poly>", "<sep>", "<od>", "\n", "<s>", "</s>",
)  # fmt: skip


def processor_of(checkpoint: Path) -> Any:
    """Return the processor of a checkpoint."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"),
        **_NAMES,
        extra_special_tokens={"image_token": "<image>"},
    )
    images = transformers.CLIPImageProcessorPil.from_pretrained(checkpoint)
    return transformers.Florence2Processor(images, tokenizer, post_processor_config=RULES)


def transformers_answers(checkpoint: Path) -> dict[str, Any]:
    """Return what transformers makes of a picture.

    Returns:
        ``pixels`` [3, height, width]; by number of the task ``states`` [rows, width], to which the decoder
        attends, and ``tokens`` with ``logits`` [tokens - 1, vocab]: those that begin, and those chosen
        greedily by the rules of generation_config.json.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    processor = processor_of(checkpoint)
    model, loading = transformers.Florence2ForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    left = {
        name for name in loading["missing_keys"] if not name.endswith(("pos_idx_to_embed", "lm_head.weight"))
    }
    if left or loading["unexpected_keys"] or loading["mismatched_keys"]:
        raise ValueError(f"the tiny checkpoint has other tensors: {loading}")
    model.eval()
    found: dict[str, Any] = {}
    for number, task in enumerate(TASKS):
        inputs = processor(images=picture(*SIZE), text=task, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(
                **inputs, do_sample=False, num_beams=1, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS
            )
            outputs = model(**inputs, decoder_input_ids=tokens[:, :-1], use_cache=False)
        found |= {
            "pixels": inputs["pixel_values"][0].numpy(),
            f"states{number}": outputs.encoder_last_hidden_state[0].numpy(),
            f"tokens{number}": tokens[0].numpy(),
            f"logits{number}": outputs.logits[0].numpy(),
        }
    return found


def readings(processor: Any) -> list[dict[str, Any]]:
    """Return texts of answers to tasks about pictures, and what transformers reads from them."""
    drawn, found = random.Random(5), []
    for task in [*processor.tasks_answer_post_processing_type] * 16:
        text = "".join(drawn.choice(_PIECES) for _ in range(drawn.randint(0, 9)))
        if task == "<OCR_WITH_REGION>":
            text += "word" + "".join(f"<loc_{drawn.randrange(1000)}>" for _ in range(8))
        size = (drawn.randint(1, 3000), drawn.randint(1, 3000))
        answer = processor.post_process_generation(text=text, task=task, image_size=size)
        found.append({"task": task, "text": text, "size": size, "answer": answer})
    return found


def main() -> None:
    """Record the files."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_florence(Path(folder), SEED)
        answers = transformers_answers(checkpoint)
        read = readings(processor_of(checkpoint))
    for number in range(len(TASKS)):
        best = np.sort(answers[f"logits{number}"], axis=-1)
        print(
            f"{number}: smallest margin {(best[:, -1] - best[:, -2]).min():.1e}", answers[f"tokens{number}"]
        )
    np.savez_compressed(GOLDEN, **answers)
    LOCATIONS.write_text(json.dumps(read, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
