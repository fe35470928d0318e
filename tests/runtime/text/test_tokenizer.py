"""Tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_kit import byte_level, word_level, write_byte_level

from carryall.errors import PackageError
from carryall.runtime.text.tokenizer import Tokenizer


def test_beginning_of_sequence_follows_the_post_processor(tmp_path: Path) -> None:
    with_bos, without = byte_level(tmp_path / "a"), word_level(tmp_path / "b")
    assert with_bos.encode("ab")[0] == 256
    assert len(with_bos.encode("ab")) == 3
    assert len(with_bos.encode("ab", add_special_tokens=False)) == 2
    assert 1 not in without.encode("the cat")


def test_add_bos_token_in_the_config_does_not_overrule_the_post_processor(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert Tokenizer(folder).encode("a")[0] == 256


def test_round_trip(tmp_path: Path) -> None:
    for tokenizer in (byte_level(tmp_path / "a"), word_level(tmp_path / "b")):
        for text in ("the cats sat!", "été 中\n", "\N{PILE OF POO} x"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_by_id_and_by_role(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert tokenizer.special_token_ids == {256, 257}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode([256, 65], skip_special_tokens=False).startswith("<s>")
    assert (tokenizer.vocab_size, tokenizer.token_id("</s>"), tokenizer.token_id("nope")) == (258, 257, None)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer(folder).encode("a" * 100)) == 101


def test_missing_and_broken_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"(?s)has no tokenizer.json.*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PackageError, match="cannot be read"):
        Tokenizer(tmp_path)
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(PackageError, match="holds a list, not a JSON object"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{,}")
    with pytest.raises(PackageError, match="not valid JSON"):
        Tokenizer(tmp_path)


def test_the_beginning_is_what_precedes_a_text(tmp_path: Path) -> None:
    assert byte_level(tmp_path / "llama3").beginning == [256]
    assert word_level(tmp_path / "llama2").beginning == []
