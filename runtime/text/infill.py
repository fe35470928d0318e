"""Prompts for the text between a prefix and a suffix, as models for code are trained to fill it."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import RequestError
from ...records import dataclass
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Infill:
    """A gap in a text.

    Args:
        prefix: the text before it.
        suffix: the text after it.
        files: names and texts of other files of the project.
    """

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Marks:
    """The tokens around the parts; ``middle`` None is a model that reads the suffix first and needs none."""

    prefix: str
    suffix: str
    middle: str | None


# Tokens of published models, from their tokenizers. The first form whose tokens a vocabulary has is used.
_FORMS = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Refact
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 -- DeepSeek
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Marks("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_SEPARATORS = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")  # before the name of a file
# Tokens that begin another file or fill up a sequence in training: the gap ends there.
_ENDS = (*_SEPARATORS, "<|repo_name|>", "<reponame>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|cursor|>")


def infill_tokens(tokenizer: Tokenizer, gap: Infill) -> tuple[list[int], tuple[int, ...]]:
    """Return the prompt of a gap, and the tokens that end its text in addition to the model's own.

    Raises:
        RequestError: the model was not trained to fill gaps.
    """
    marks = next((form for form in _FORMS if _known(tokenizer, form)), None)
    if marks is None:
        raise RequestError(
            "this model fills no gaps: its tokenizer has no tokens such as <|fim_prefix|>; send the text "
            "before the gap alone, or use a model for code"
        )
    prompt = tokenizer.beginning + _files(tokenizer, gap.files)
    prefix, suffix = ([_id(tokenizer, mark)] for mark in (marks.prefix, marks.suffix))
    prefix += tokenizer.encode(gap.prefix, add_special_tokens=False)
    suffix += tokenizer.encode(gap.suffix, add_special_tokens=False)
    if marks.middle is None:
        prompt += suffix + prefix
    else:
        prompt += [*prefix, *suffix, _id(tokenizer, marks.middle)]
    ends = (tokenizer.token_id(end) for end in _ENDS)
    return prompt, tuple(end for end in ends if end is not None)


def _files(tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> list[int]:
    separator = next((mark for mark in _SEPARATORS if tokenizer.token_id(mark) is not None), None)
    tokens: list[int] = []
    for name, text in files:
        if separator is not None:
            tokens.append(_id(tokenizer, separator))
        tokens += tokenizer.encode(f"{name}\n{text}\n", add_special_tokens=False)
    return tokens


def _known(tokenizer: Tokenizer, marks: _Marks) -> bool:
    wanted = (marks.prefix, marks.suffix, marks.middle)
    return all(mark is None or tokenizer.token_id(mark) is not None for mark in wanted)


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_id(token)
    assert found is not None  # noqa: S101 -- ``_known`` has found it
    return found
