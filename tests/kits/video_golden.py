"""Golden files of families that read videos: the results of transformers for tiny checkpoints and a video.

``python tests/kits/video_golden.py [FAMILY ...]``, with torch, torchvision, num2words and transformers,
records them again. The frames need no resizing: transformers resizes those of videos with torchvision, which
rounds otherwise than Pillow.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_vlms import write_vlm
from vision_golden import golden_path, picture

Array = npt.NDArray[Any]

FAMILIES = ("smolvlm", "llava_next_video", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
QUESTION, FPS, NEW_TOKENS, SEED = "What happens?", 4, 16, 1
_SIZES = {"smolvlm": (32, 32), "llava_next_video": (32, 32)}
_QWEN = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 96},
}
_QWEN3 = {
    **_QWEN,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 16 * 16, "longest_edge": 5 * 96 * 96},  # of all frames together
    "cap_pixels_per_frame": False,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "video_processor_type": "SmolVLMVideoProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
    },
    "llava_next_video": {
        "video_processor_type": "LlavaNextVideoVideoProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), _QWEN3),
}


def frames(family: str) -> list[npt.NDArray[np.uint8]]:
    """Return five frames, which are no whole number of patches of Qwen's towers in time."""
    return [picture(*_SIZES.get(family, (48, 80)), shift=30 * number) for number in range(5)]


def write_checkpoint(folder: Path, family: str) -> Path:
    """Write a tiny checkpoint whose video processor is described."""
    write_vlm(folder, family, seed=SEED)
    text = json.dumps(_SETTINGS[family])
    (folder / "video_preprocessor_config.json").write_text(text, encoding="utf-8")
    return folder


def video_path(family: str) -> Path:
    """Return the path of a family's golden file."""
    return golden_path(f"{family}-video")


def transformers_answer(checkpoint: Path, family: str) -> dict[str, Array]:
    """Return what transformers computes from the video and a question about it.

    Returns:
        ``token_ids`` [tokens] of the prompt, ``positions`` [3, tokens] of Qwen's families, ``logits``
        [vocabulary] behind the prompt, and ``tokens`` [new], chosen greedily.
    """
    import torch
    import transformers
    from transformers.video_utils import VideoMetadata

    seen = np.stack(frames(family))
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    parts = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    count = len(seen)
    metadata = VideoMetadata(
        total_num_frames=count, fps=FPS, duration=count / FPS, frames_indices=list(range(count))
    )
    options = {"add_special_tokens": False, "return_tensors": "pt", "do_sample_frames": False}
    inputs = dict(processor(text=[text], videos=[seen], video_metadata=[[metadata]], **options))
    inputs.pop("attention_mask")
    if family == "qwen2_5_vl":  # the processor of transformers 5.24 computes it, and leaves it out
        inputs["second_per_grid_ts"] = torch.tensor([processor.video_processor.temporal_patch_size / FPS])
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    known, types = inputs.pop("input_ids"), inputs.pop("mm_token_type_ids", None)
    answer: dict[str, Array] = {"token_ids": known[0].numpy()}
    if types is not None:
        places = {name: value for name, value in inputs.items() if "grid" in name}
        answer["positions"] = model.model.get_rope_index(known, types, **places)[0][:, 0].numpy()
    tokens, logits = list[int](), []
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            model.model.rope_deltas = None  # kept from the run before
            further = {} if types is None else {"mm_token_type_ids": types}
            out = model(input_ids=known, **further, **inputs, use_cache=False)
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
            known = torch.cat([known, torch.tensor([[tokens[-1]]])], dim=1)
            types = None if types is None else torch.nn.functional.pad(types, (0, 1))
    return {**answer, "logits": logits[0], "tokens": np.array(tokens)}


def _record(families: Sequence[str]) -> None:
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            answer: dict[str, Any] = transformers_answer(write_checkpoint(Path(folder), family), family)
        np.savez_compressed(video_path(family), **answer)
        print(family, {name: array.shape for name, array in answer.items()}, answer["tokens"])


if __name__ == "__main__":
    _record(sys.argv[1:])
