"""The training script of the reader draws what it says, computes SmolVLM, and writes a folder that is one."""

from __future__ import annotations

import importlib
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TINY = shlex.split(
    "--hidden 64 --layers 1 --ff 64 --tower-layers 1 --tower-ff 64 --batch 4 --no-compile --minutes 1"
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))  # where Python finds the modules beside a script
    yield importlib.import_module("train_reader")
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def fonts() -> Path:
    """Return a folder of one font that any system with fonts has."""
    folder = Path("/usr/share/fonts/truetype/dejavu")
    if not (folder / "DejaVuSans.ttf").exists():
        pytest.skip("needs fonts-dejavu")
    return folder


@pytest.fixture(scope="module")
def desk(script: ModuleType, fonts: Path) -> Any:
    rng = random.Random(3)
    printer = script.Printer(script.font_files([fonts], held_out=False), ["lemma", "Ingrid"], rng)
    return script.Desk(printer, script.new_tokenizer(), rng)


@pytest.fixture(scope="module")
def trained(script: ModuleType, fonts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reader") / "tiny"
    script.main(
        [
            "--out",
            str(out),
            "--fonts",
            str(fonts),
            "--max-steps",
            "2",
            "--tower-part",
            "0",
            "--alone",
            "0",
            *TINY,
        ]
    )
    return out


def test_the_characters_of_tokens_are_the_text_in_order(script: ModuleType, desk: Any) -> None:
    read = wanted = ""
    for page in desk.pages(20, 4, (1, 4), 0.5):
        read += "".join(script.CHARACTERS[each - 1] for each in page.characters.ravel() if each)
        wanted += "".join(page.lines)
    # a rotation moves some characters to the next row of tokens
    assert script.edits(wanted, read) < 0.02 * len(wanted)


def test_words_and_fonts_of_the_measurement_are_never_trained_on(script: ModuleType) -> None:
    seen, held = (script.words(held_out=kind) for kind in (False, True))
    assert len(held) > 500
    assert not {word.lower() for word in seen} & {word.lower() for word in held}


def test_losses_equal_those_of_transformers(script: ModuleType, desk: Any, trained: Path) -> None:
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(trained, dtype=torch.float32)
    weights = {
        name: weight.float() for name, weight in model.state_dict().items() if name != "lm_head.weight"
    }
    reader = script.Reader(weights, compiled=False)
    pixels, _, ids, scored = desk.tensors(desk.pages(3, 4, (1, 3), 0.5))
    cut = script.patches(pixels)
    with torch.no_grad():
        states = reader.image_states(cut)
        loss = reader.text_loss(states, ids, desk.tokenizer.token_to_id(script.IMAGE), scored)
        side = script.TILE // script.PATCH
        tiles = cut.float().view(3, -1, side, side, 3, script.PATCH, script.PATCH)
        tiles = tiles.permute(0, 1, 4, 2, 5, 3, 6).reshape(3, -1, 3, script.TILE, script.TILE)
        labels = ids.where(scored, -100)
        known = model(input_ids=ids, pixel_values=tiles, labels=labels).loss
    assert loss.item() == pytest.approx(known.item(), rel=5e-3)  # bf16


def test_the_prompt_is_that_of_the_processor(script: ModuleType, desk: Any, trained: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(trained)
    (page,) = desk.pages(1, 2, (2, 2), 0)
    parts = [{"type": "image"}, {"type": "text", "text": script.READ}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=prompt, images=[Image.fromarray(page.pixels).convert("RGB")])
    assert list(np.ravel(inputs["input_ids"])) == desk.prompt(page, script.READ)


def test_edits_count_insertions_deletions_and_replacements(script: ModuleType) -> None:
    assert script.edits("kitten", "sitting") == 3
    assert script.edits("", "abc") == 3
    assert script.edits("abc", "abc") == 0
