"""Golden files of families that see: the results of transformers for tiny checkpoints and two pictures.

``python tests/kits/seeing_golden.py [FAMILY ...]``, with torch and transformers, records them again;
``lfm2_vl`` needs torchvision too.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_vlms import family as tiny_family
from tiny_vlms import write_vlm
from vision_golden import golden_path, picture

Array = npt.NDArray[Any]

# Further files are of the one picture whose tokens depend on whether there are others.
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *(
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "llava_onevision-alone",
        "internvl",
        "mistral3",
    ),
    *("lighton_ocr", "llava+pixtral"),
    *("gemma3", "gemma3+crops", "gemma4", "gemma4+joined"),
    *("qwen3_5", "qwen3_5_moe", "paddleocr_vl", "glm_ocr", "lfm2_vl"),
)
NEW_TOKENS = 16
QUESTION = "What differs?"
SEED = 1


def pictures(family: str = "") -> list[npt.NDArray[np.uint8]]:
    """Return two pictures of different sizes, of which no edge is a whole number of tokens; or one."""
    return [picture(85, 90)] if family.endswith("-alone") else [picture(50, 90), picture(70, 37, 9)]


def transformers_answer(
    checkpoint: Path, model_type: str, pixels: Sequence[npt.NDArray[np.uint8]]
) -> dict[str, Array]:
    """Return what transformers computes from pictures and a question about them.

    Returns:
        ``token_ids`` [tokens] of the prompt, ``pixel_values`` as the tower takes them, ``image_states``
        [rows, hidden] of all pictures, ``logits`` [vocabulary] behind the prompt, and ``tokens`` [new],
        chosen greedily.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    processor = _processor(checkpoint, model_type, tokenizer)
    parts = [*({"type": "image"} for _ in pixels), {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    inputs = dict(
        processor(
            text=[text],
            images=[list(pixels)],
            return_tensors="pt",
            add_special_tokens=False,
            **crop_options(model_type),
        )
    )
    inputs.pop("attention_mask")
    model, loading = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"the tiny checkpoint of {model_type} has other tensors: {loading}")
    model.eval()
    known, tokens, logits = inputs.pop("input_ids"), list[int](), []
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in inputs), "")
    types = inputs.pop(kinds, None)
    prompt = known[0].numpy()
    with torch.inference_mode():
        features = model.model.get_image_features(**inputs)
        for _ in range(NEW_TOKENS):
            further = {} if types is None else {kinds: types}
            model.model.rope_deltas = None  # kept from the run before
            out = model(input_ids=known, **further, **inputs, use_cache=False)
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
            known = torch.cat([known, torch.tensor([[tokens[-1]]])], dim=1)
            types = (
                None if types is None else torch.cat([types, torch.zeros((1, 1), dtype=types.dtype)], dim=1)
            )
    columns = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    columns = [torch.cat(list(part)) if isinstance(part, list | tuple) else part for part in columns]
    return {
        "token_ids": prompt,
        "pixel_values": inputs["pixel_values"].numpy(),
        "image_states": torch.cat([part.reshape(-1, part.shape[-1]) for part in columns], dim=1).numpy(),
        "logits": logits[0],
        "tokens": np.array(tokens),
    }


def crop_options(model_type: str) -> dict[str, Any]:
    """Return the options of preprocessor_config.json that Gemma's processor takes from its caller only."""
    files = tiny_family(model_type).preprocessor
    return {name: value for name, value in files.items() if "pan_and_scan" in name and value is not None}


def _processor(checkpoint: Path, model_type: str, tokenizer: Any) -> Any:
    """Return the processor with its image processor on Pillow."""
    import transformers

    files = tiny_family(model_type)
    name = str(files.processor["processor_class"])
    images = _image_processor(str(files.preprocessor["image_processor_type"]))
    options = {key: value for key, value in files.processor.items() if key != "processor_class"}
    # The video processors need torchvision, which would also replace Pillow in those of pictures.
    base = _pixtral_processor() if name == "PixtralProcessor" else getattr(transformers, name)
    kind = type(name, (base,), {"check_argument_for_proper_class": _anything})
    video = (
        {"video_processor": None}
        if name.startswith(("Qwen", "LlavaOne", "LlavaNextVideo", "Intern", "Glm"))
        else {}
    )
    video |= {"feature_extractor": None, "video_processor": None} if name == "Gemma4Processor" else {}
    return kind(image_processor=images.from_pretrained(checkpoint), tokenizer=tokenizer, **video, **options)


def _pixtral_processor() -> Any:
    """Return Pixtral's processor, whose module imports torchvision for nothing that a prompt needs."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    if missing := [name for name in names if name not in sys.modules]:
        for name in missing:
            sys.modules[name] = types.ModuleType(name)
        sys.modules[names[-1]].functional = None  # type: ignore[attr-defined]
    try:
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    finally:
        for name in missing:
            del sys.modules[name]


def _image_processor(name: str) -> Any:
    """Return the class of an image processor on Pillow; one that knows torchvision only resizes with Pillow.

    torchvision's filters are those of Pillow in other integers, and change values by 1.
    """
    import transformers

    name = name.removesuffix("Fast")
    images = getattr(transformers, f"{name}Pil", None)
    if images is None:
        images = getattr(transformers, name)
        images.__base__.resize = _resize
    return images


def _resize(self: Any, image: Any, size: Any, resample: Any, **_: Any) -> Any:
    """Return pictures [n, 3, height, width] in another size, by Pillow."""
    import torch
    from PIL import Image

    resized = [
        np.array(Image.fromarray(each).resize((size.width, size.height), resample))
        for each in image.permute(0, 2, 3, 1).numpy()
    ]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def _anything(self: Any, name: str, argument: Any) -> None:
    """Accept any part of a processor."""


def _record(families: Sequence[str]) -> None:
    for name in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model_type = name.removesuffix("-alone")
            checkpoint = write_vlm(Path(folder), model_type, seed=SEED)
            answer = transformers_answer(checkpoint, model_type, pictures(name))
        arrays: dict[str, Any] = dict(answer)
        np.savez_compressed(golden_path(name), **arrays)
        print(name, {key: array.shape for key, array in answer.items()}, answer["tokens"])


if __name__ == "__main__":
    _record(sys.argv[1:])
