"""Generation defaults of a checkpoint: end tokens and sampling options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, PackageError
from ...exporter.config import read_generation_config, stated_token
from ...records import dataclass
from ..types.sampling_params import SamplingParams

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")
OLLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_OFF: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "temperature": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """End tokens, and sampling options for requests that give none.

    Args:
        end_token_ids: tokens that end an output.
        sampling: the options of ``SamplingParams`` that the checkpoint sets.
        says_how: whether the checkpoint says how to sample, even if by the values of ``SamplingParams``.
        start_token_ids: with which a decoder begins that attends to its encoder's rows; empty if not stated.
    """

    end_token_ids: frozenset[int] = frozenset()
    sampling: dict[str, Any] = field(default_factory=dict)
    says_how: bool = False
    start_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path, config: Callable[[], Mapping[str, Any]]) -> GenerationDefaults:
        """Read generation_config.json or genai_config.json; missing end tokens are taken from config.json.

        Args:
            folder: the folder of the checkpoint.
            config: returns the content of its ``config.json``.

        Raises:
            PackageError: a file is not a JSON object, or ``eos_token_id`` is not an integer or a list of
                them.
        """
        try:
            generation = read_generation_config(folder)
        except CheckpointError as error:
            raise PackageError(str(error)) from error
        raw = config()
        end = stated_token(raw, generation, "eos_token_id")
        starts = (stated_token(raw, generation, f"{name}_token_id") for name in ("decoder_start", "bos"))
        says_how = any(generation.get(name) is not None for name in ("do_sample", *_OPTIONS))
        # The first token that is generated may be forced, which is the same as to begin with it.
        forced = [stated_token(raw, generation, "forced_bos_token_id")]
        begin = [token for token in starts if type(token) is int][:1]
        start = (*begin, *(token for token in forced if begin and type(token) is int))
        return cls(_token_ids(end, folder), _sampling(generation), says_how, start)

    @property
    def served(self) -> dict[str, Any]:
        """The options of requests over a network and of lines of a batch that give none.

        Their clients expect readable text, which small models do not write at temperature 1 over the whole
        vocabulary; a checkpoint that says nothing is sampled as Ollama samples it.
        """
        return self.sampling if self.says_how else {**OLLAMA, **self.sampling}

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        """Return the options of a request that gives none.

        Args:
            max_tokens: used if the checkpoint sets no ``max_new_tokens``.
        """
        return SamplingParams(**{"max_tokens": max_tokens, **self.sampling})


def _token_ids(value: Any, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise PackageError(f"eos_token_id of {folder} must be an integer or a list of them, not {value!r}")
    return frozenset(ids)


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for ``SamplingParams``; ``do_sample: false`` is greedy, as in transformers."""
    sampling = {name: generation[name] for name in _OPTIONS if generation.get(name) is not None}
    sampling = {name: value for name, value in sampling.items() if value != _OFF[name]}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    if generation.get("max_new_tokens") is not None:
        sampling["max_tokens"] = generation["max_new_tokens"]
    return sampling
