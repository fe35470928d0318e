"""The forms of paged runs: the few sizes that a device captures, to which steps are padded.

A captured run has fixed shapes, so a step uses the smallest form that holds it. Its padding are tokens of
further rows, whose KV goes to a scratch block that no sequence has.
"""

from __future__ import annotations

from ...records import dataclass

_DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MIXED_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
_MIXED_ROWS = (2, 9, 33, 65, 129, 257)  # powers of two, and a row for padding
_WIDTH, _WIDER = 8, 8  # blocks of the smallest form, and the factor of the next
_SPLIT = 513  # tokens of a row from which kernels of ONNX Runtime 1.31 split its keys over the processors
# A run of more than twice the tokens costs more than capturing saves, unless it has this few.
_MOST_PADDING, _FEW = 2, 64


@dataclass(frozen=True, slots=True)
class Form:
    """The sizes of a run.

    Args:
        tokens: of all rows.
        rows: rows; those behind the padding have no tokens.
        width: blocks of a row.
        query: bound on the new tokens of a row.
        reach: bound on the tokens of a row after the run.
        longest: lower bound on those of the longest row; 0 is none.
    """

    tokens: int
    rows: int
    width: int
    query: int
    reach: int
    longest: int = 0

    @property
    def padding(self) -> int:
        """The maximum number of padding tokens in one row."""
        return min(self.query, self.reach)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of a step, as those of ``Form``; all are exact."""

    tokens: int
    rows: int
    width: int
    query: int
    longest: int


class Forms:
    """Chooses the form of a step.

    Args:
        block_size: tokens of a block.
        most_blocks: maximum blocks of a row.
        slots: maximum rows of a step.
    """

    def __init__(self, block_size: int, most_blocks: int, slots: int) -> None:
        self._block_size, self._most_blocks = block_size, most_blocks
        self._decode, self._mixed = _up_to(_DECODE_ROWS, slots), _up_to(_MIXED_ROWS, slots + 1)

    @property
    def most_rows(self) -> int:
        """The rows of the largest form."""
        return max(self._decode[-1], self._mixed[-1])

    def smallest(self) -> list[Form]:
        """Return the forms of steps of one token a row, on short contexts."""
        found = (self.choose(StepSizes(rows, rows, 1, 1, 1)) for rows in self._decode)
        return [form for form in found if form is not None]

    def choose(self, step: StepSizes) -> Form | None:
        """Return the smallest form that holds a step, None if there is none."""
        if step.query == 1:
            rows = next((rows for rows in self._decode if rows >= step.rows), None)
            return None if rows is None else self._form(step, rows, rows, 1)
        for tokens in _MIXED_TOKENS:
            if tokens < step.tokens or tokens > max(_FEW, _MOST_PADDING * step.tokens):
                continue
            for query in (tokens // 4, tokens):
                if query < step.query:
                    continue
                padding = self._form(step, tokens, 0, query).padding
                needed = step.rows + -(-(tokens - step.tokens) // padding)
                # With as many rows as tokens, kernels expect one token in each.
                rows = next((rows for rows in self._mixed if needed <= rows < tokens), None)
                if rows is not None:
                    return self._form(step, tokens, rows, query)
        return None

    def _form(self, step: StepSizes, tokens: int, rows: int, query: int) -> Form:
        width = _WIDTH
        while width < step.width:
            width *= _WIDER
        width = min(width, self._most_blocks)
        longest = _SPLIT if query == 1 and step.longest >= _SPLIT else 0
        return Form(tokens, rows, width, query, width * self._block_size, longest)


def _up_to(ladder: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the sizes up to the first that holds so many rows."""
    count = sum(size < rows for size in ladder)
    return ladder[: count + 1]
