"""What the option ``speculative`` means."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UsageError
from ..engine.speculation.draft_model import DraftModel
from ..engine.speculation.prompt_lookup import PromptLookup
from ..engine.speculation.proposer import Proposer
from .loaded import LoadedModel

PROMPT_LOOKUP = "prompt-lookup"
DRAFT = "draft:"


def make_proposer(
    method: str, max_tokens: int | None, model: LoadedModel, load: Callable[[str], LoadedModel]
) -> Proposer:
    """A proposer for ``model``.

    Args:
        method: ``prompt-lookup`` or ``draft:MODEL``.
        max_tokens: most tokens of one proposal; None leaves it to the method.
        model: whose tokens are proposed.
        load: loads the draft model.

    Raises:
        UsageError: there is no such method, or the draft model knows other tokens.
    """
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    if method == PROMPT_LOOKUP:
        return PromptLookup(**limit)
    name = method.removeprefix(DRAFT)
    if name == method or not name:
        raise UsageError(f"no speculative method '{method}'; choose {PROMPT_LOOKUP} or {DRAFT}MODEL")
    draft = load(name)
    try:
        _check_same_tokens(draft, model)
    except UsageError:
        draft.runner.close()
        raise
    return DraftModel(draft.runner, **limit)


def _check_same_tokens(draft: LoadedModel, model: LoadedModel) -> None:
    """Make sure that a token id means the same to both.

    Raises:
        UsageError: it does not, or that cannot be told.
    """
    for each in (draft, model):
        if each.tokenizer is None:
            raise UsageError(f"{each.name} has no tokenizer.json, so its tokens cannot be compared")
    assert draft.tokenizer is not None and model.tokenizer is not None  # noqa: S101, PT018 -- checked above
    own, wanted = draft.tokenizer.vocabulary, model.tokenizer.vocabulary
    if own != wanted:
        shared = sum(wanted.get(token) == token_id for token, token_id in own.items())
        raise UsageError(
            f"{draft.name} cannot draft for {model.name}: their tokenizers differ ({len(own)} and "
            f"{len(wanted)} tokens, {shared} of them the same); take a smaller model of the same family"
        )
