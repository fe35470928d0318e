"""What a checkpoint's own files say about generating with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import PackageError
from ..text.tokenizer import read_optional_json
from ..types.sampling_params import SamplingParams

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OFF: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "temperature": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """End tokens, and sampling options for requests that give none.

    Args:
        end_token_ids: tokens that end a text.
        sampling: options for ``SamplingParams``, as far as the checkpoint states any.
    """

    end_token_ids: frozenset[int] = frozenset()
    sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path, config: Callable[[], Mapping[str, Any]]) -> GenerationDefaults:
        """Read ``generation_config.json``, and ``config.json`` for end tokens that it leaves out.

        Args:
            folder: of the checkpoint.
            config: gives the content of its ``config.json``.

        Raises:
            PackageError: a value is not what it should be.
        """
        generation = read_optional_json(folder / "generation_config.json")
        end = generation.get("eos_token_id")
        if end is None:
            end = config().get("eos_token_id")
        return cls(_token_ids(end, folder), _sampling(generation))

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        """The options of a request that gives none.

        Args:
            max_tokens: where the checkpoint states no ``max_new_tokens``.
        """
        return SamplingParams(**{"max_tokens": max_tokens, **self.sampling})


def _token_ids(value: Any, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise PackageError(f"eos_token_id of {folder} must be one or several integers, not {value!r}")
    return frozenset(ids)


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Options in our terms: an explicit ``do_sample: false`` is greedy, as it is to transformers."""
    sampling = {name: generation[name] for name in _OPTIONS if generation.get(name) is not None}
    sampling = {name: value for name, value in sampling.items() if value != _OFF[name]}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    if generation.get("max_new_tokens") is not None:
        sampling["max_tokens"] = generation["max_new_tokens"]
    return sampling
