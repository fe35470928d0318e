"""transformers opens a package's processor, and it writes the prompt that carryall writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from seeing_golden import FAMILIES, QUESTION, SEED, crop_options, pictures
from tiny_vlms import write_vlm
from vision_golden import golden_path, picture

from carryall.runtime.tasks.export import export

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchvision", reason="the processors of transformers need torch and torchvision")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "idefics3", *FAMILIES])
def test_auto_processor_opens_a_package(tmp_path: Path, family: str) -> None:
    seen, question, seed = pictures(family), QUESTION, SEED
    if family in ("smolvlm", "idefics3"):
        pytest.importorskip("num2words")
        seen, question, seed = [picture()], "What is it?", 0
    export(write_vlm(tmp_path / "checkpoint", family.removesuffix("-alone"), seed=seed), tmp_path / "package")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "package")
    parts = [*({"type": "image"} for _ in seen), {"type": "text", "text": question}]
    conversation = [{"role": "user", "content": parts}]
    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    options = crop_options(family.removesuffix("-alone"))
    inputs = processor(text=[text], images=[list(seen)], add_special_tokens=False, **options)
    assert list(np.ravel(inputs["input_ids"])) == np.load(golden_path(family))["token_ids"].tolist()
