"""Keyword arguments of a client's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Sampling(TypedDict, total=False):
    """Sampling options; see ``SamplingOptions`` in proto/carryall/v1/sampling.proto.

    ``structured_output`` has one of the keys json_schema (an object or its text), json_object, regex,
    grammar and choice (a list of texts). ``watermark`` is true (green lists with the usual values), or has
    fields of ``Watermark`` there.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    typical_p: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str | Sequence[int]]
    structured_output: Mapping[str, Any]
    n: int
    best_of: int
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    logprob_token_ids: Sequence[int]
    prompt_logprobs: int
    prompt_logprobs_start: int
    reasoning_budget: int
    repetition_guard: int
    watermark: bool | Mapping[str, Any]


class Scheduling(TypedDict, total=False):
    """Scheduling options; see ``GenerateRequest`` in proto/carryall/v1/generation.proto."""

    request_id: str
    priority: int
    cache_salt: str
    tenant: str
    timeout_seconds: float


class Options(Sampling, Scheduling, total=False):
    """All options of a generation or chat request."""


class TextOptions(TypedDict, total=False):
    """Options of texts for an encoder."""

    prompt_name: str
    """The prompt of the model that is put before each text; by default that of the model."""
    truncate: bool
    """Cut texts that are too long, instead of refusing them; by default as the model is served."""


class ClassifyOptions(TypedDict, total=False):
    """Options of a classification."""

    candidate_labels: Sequence[str]
    """Labels for a model of natural language inference to choose from."""
    hypothesis: str
    """A sentence with {} in place of a candidate label."""
    multi_label: bool
    """Candidate labels do not exclude each other."""
    raw_scores: bool
    """Return logits, instead of probabilities."""
    truncate: bool
    """Cut texts that are too long, instead of refusing them; by default as the model is served."""
    aggregation: str
    """How a classifier of tokens joins them: none, simple, first, average or max."""
