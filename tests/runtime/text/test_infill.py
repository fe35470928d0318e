"""Prompts of gaps, in the order in which each kind of model was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_kit import byte_level, byte_level_with
from tokenizers import AddedToken

from carryall.errors import RequestError
from carryall.runtime.text.infill import Infill, infill_tokens

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def shown(folder: Path, added: list[str], gap: Infill) -> tuple[str, list[str]]:
    """The prompt and the tokens that end the text, as texts."""
    tokenizer = byte_level_with(folder, [AddedToken(token, special=True) for token in added])
    tokens, ends = infill_tokens(tokenizer, gap)
    return tokenizer.decode(tokens, skip_special_tokens=False), [
        tokenizer.decode([end], skip_special_tokens=False) for end in ends
    ]


def test_prefix_and_suffix_stand_before_the_middle(tmp_path: Path) -> None:
    text, ends = shown(tmp_path, QWEN, Infill("a(", ")"))
    assert text == "<s><|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"
    assert sorted(ends) == ["<|file_sep|>", "<|fim_pad|>", "<|repo_name|>"]


def test_other_files_stand_first_with_their_names(tmp_path: Path) -> None:
    files = (("x.py", "X = 1"), ("y.py", "Y = 2"))
    text, _ = shown(tmp_path, QWEN, Infill("a", "b", files))
    assert text == (
        "<s><|file_sep|>x.py\nX = 1\n<|file_sep|>y.py\nY = 2\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    (tmp_path / "other").mkdir()
    text, _ = shown(tmp_path / "other", QWEN[:3], Infill("a", "b", files[:1]))
    assert text == "<s>x.py\nX = 1\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<s><fim_prefix>a<fim_suffix>b<fim_middle>"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "<s>▁<PRE>a▁<SUF>b▁<MID>"),
        (["[PREFIX]", "[SUFFIX]"], "<s>[SUFFIX]b[PREFIX]a"),
    ],
)
def test_other_models_have_other_tokens(tmp_path: Path, added: list[str], text: str) -> None:
    assert shown(tmp_path, added, Infill("a", "b"))[0] == text


def test_a_model_without_such_tokens_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fills no gaps"):
        infill_tokens(byte_level(tmp_path), Infill("a", "b"))
