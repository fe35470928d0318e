"""What encoders and classifiers of texts share: the tokenizer and the runs of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...storage.paths import check_name
from ..types.providers import Providers
from .load_encoder import model_file, prepared_encoder
from .text_session import Tokens
from .token_batches import Text, TokenBatches, numbered


class EncoderModel:
    """A model over texts, with its tokenizer. Thread-safe.

    Args:
        folder: a package of ``carryall export``, a checkpoint, a folder with an ONNX file, or this file.
        providers: as for ``InferenceSession``.
        max_tokens: tokens of the longest text, special tokens included; None reads it from the folder.
        truncate: cut longer texts, instead of refusing them, unless a call says otherwise.

    Attributes:
        folder: the folder of the ONNX file.
        max_tokens: tokens of the longest text, special tokens included; None for no limit.
        truncates: whether longer texts are cut, unless a call says otherwise.

    Raises:
        CarryallError: see ``TokenBatches``, and ``carryall.export`` for a checkpoint.
    """

    def __init__(
        self, folder: str | Path, providers: Providers | None, max_tokens: int | None, truncate: bool
    ) -> None:
        source = Path(folder)
        check_name(source)
        self.folder = prepared_encoder(source)
        file = source if source.is_file() else model_file(self.folder)
        self._batches = TokenBatches(self.folder, file, providers, max_tokens)
        self.max_tokens = self._batches.max_tokens
        self.truncates = truncate

    def encode(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool | None = None,
        name: Callable[[int], str] = numbered,
    ) -> list[Tokens]:
        """Return the tokens of texts, which the methods of the model take in place of texts.

        Args:
            texts: texts, pairs of texts, lists of token ids, or tokens, which are returned as they are.
            truncate: cut texts that are too long; None does as the constructor says.
            name: what errors call the text at a place.

        Raises:
            RequestError: ``texts`` is one text, or a text has no token or is not valid.
            PromptTooLongError: a text is too long.
        """
        return self._batches.encode(
            texts, truncate=self.truncates if truncate is None else truncate, name=name
        )

    def token_counts(self, texts: Sequence[Text]) -> list[int]:
        """Return the number of tokens of each text, special tokens included, after the cut."""
        return [len(tokens.ids) for tokens in self._batches.encode(texts, truncate=True)]

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Tokens]:
        """Return the tokens of texts of any length.

        Raises:
            RequestError: ``texts`` is one text, or a text is not valid.
        """
        return self._batches.tokenize(texts, add_special_tokens=add_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it."""
        return str(self._batches.tokenizer.id_to_token(token_id) or "")

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: a token id is out of range.
        """
        self._batches.check_ids(token_ids)
        return str(self._batches.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
