"""Make the proposer that the option ``speculative`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...exporter.drafters.kinds import drafter_kind
from ...exporter.hub import is_hub_id
from ...providers.base import Runner
from ..engine.speculation.draft_head import DraftHead
from ..engine.speculation.draft_model import DraftModel
from ..engine.speculation.prompt_lookup import PromptLookup
from ..engine.speculation.proposer import Proposer
from .find import find_model
from .loaded import LoadedModel

PROMPT_LOOKUP = "prompt-lookup"
MTP = "mtp"
DRAFT = "draft:"


def make_proposer(
    method: str,
    max_tokens: int | None,
    model: LoadedModel,
    load: Callable[[str], LoadedModel],
    open_head: Callable[[Path | None], Runner],
    open_drafter: Callable[[Path, Mapping[str, Any]], Proposer],
) -> Proposer:
    """Return a proposer for ``model``.

    Args:
        method: ``prompt-lookup``, ``mtp``, ``mtp:FOLDER`` or ``draft:MODEL``, where MODEL may be a drafter.
        max_tokens: maximum tokens of one proposal; None takes the default of the method.
        model: the model that verifies the proposals.
        load: loads the draft model.
        open_head: opens a runner of the model's own head, or of one with the tensors of a folder.
        open_drafter: returns the proposer of the drafter in a folder, given its options.

    Raises:
        UsageError: there is no such method, the provider returns no hidden states, or the draft model has
            another tokenizer.
    """
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    if method == PROMPT_LOOKUP:
        return PromptLookup(**limit)
    if method == MTP or method.startswith(f"{MTP}:"):
        return _draft_head(model, method.removeprefix(MTP).removeprefix(":"), open_head, limit)
    name = method.removeprefix(DRAFT)
    if name == method or not name:
        raise UsageError(
            f"there is no speculative method '{method}'; choose {PROMPT_LOOKUP}, {MTP} or {DRAFT}MODEL"
        )
    if (folder := drafter_folder(method)) is not None:
        return open_drafter(folder, limit)
    draft = load(name)
    try:
        _check_same_tokens(draft, model)
    except UsageError:
        draft.runner.close()
        raise
    return DraftModel(draft.runner, **limit)


def _draft_head(
    model: LoadedModel,
    folder: str,
    open_head: Callable[[Path | None], Runner],
    limit: Mapping[str, Any],
) -> DraftHead:
    """Return the proposer of a head.

    Raises:
        UsageError: there is none, or the model's runner returns no hidden states.
    """
    if not model.runner.info.embedding_size:
        raise UsageError(
            f"provider '{model.provider}' returns no hidden states of {model.name}, which a draft head "
            f"reads; choose provider cpu, or {PROMPT_LOOKUP}"
        )
    return DraftHead(open_head(Path(folder) if folder else None), **limit)


def drafter_folder(method: str | None) -> Path | None:
    """Return the folder of the drafter that ``draft:MODEL`` names; None if it names none.

    A hub id is downloaded.

    Raises:
        CheckpointError: its config.json is damaged.
    """
    if method is None or not method.startswith(DRAFT):
        return None
    name = method.removeprefix(DRAFT)
    folder = Path(name).expanduser()
    if not folder.exists() and is_hub_id(name):
        folder = find_model(name)
    return folder if drafter_kind(folder) is not None else None


def _check_same_tokens(draft: LoadedModel, model: LoadedModel) -> None:
    """Check that both models have the same vocabulary.

    Raises:
        UsageError: they do not, or one has no tokenizer.
    """
    for each in (draft, model):
        if each.tokenizer is None:
            raise UsageError(f"{each.name} has no tokenizer.json, so its tokens cannot be compared")
    assert draft.tokenizer is not None and model.tokenizer is not None  # noqa: S101, PT018 -- checked above
    vocabulary, wanted = draft.tokenizer.vocabulary, model.tokenizer.vocabulary
    if vocabulary != wanted:
        shared = sum(wanted.get(token) == token_id for token, token_id in vocabulary.items())
        raise UsageError(
            f"{draft.name} cannot draft for {model.name}: their tokenizers differ ({len(vocabulary)} and "
            f"{len(wanted)} tokens, {shared} of them equal); use a smaller model of the same family"
        )
