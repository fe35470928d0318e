"""How a target wants the steps of a slot runner cut into runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """The defaults are those of the CPU, where they were measured.

    Args:
        prefill_chunk: most tokens of a prompt in one run, so that intermediate tensors stay small.
        max_scores: most attention scores [tokens of the piece, tokens so far] of a run; long contexts get
            smaller pieces.
        max_hole: idle slots that may ride along in a decode run. On the CPU one costs no more than another
            run, which reads all weights again; two cost more.
        max_rows: most slots in one decode run.
        joint_tokens: most tokens of several rows' prompts in one run, padding included, where the graph can.
        max_padding: most tokens by which a row may be shorter than the longest of its run: so many cost no
            more than another run.
        min_joint: fewest tokens of a row in such a run: for so many the kernels are those of a row alone.
        narrow_rows: most slots of a decode run in the session made for few rows, where there is one.
        narrow_tokens: most tokens of a prompt's piece in that session.
        buckets: sizes of decode runs from slot 0 on, ascending; a run is as large as the next of them. Empty
            runs the slots in use. Devices that replay captured runs want few different ones.
        capture: decode runs in buckets are captured once and replayed, so nothing about them but the content
            of their inputs may change.
        prompts_on_cache: several tokens of a row may run on top of cached ones; if not, only fresh prompts
            run whole, and what continues a cache runs token by token.
    """

    prefill_chunk: int = 128
    max_scores: int = 2**21
    max_hole: int = 1
    joint_tokens: int = 512
    max_padding: int = 16
    min_joint: int = 16
    max_rows: int = 2**31
    narrow_rows: int = 2**31
    narrow_tokens: int = 0
    buckets: tuple[int, ...] = ()
    capture: bool = False
    prompts_on_cache: bool = True

    def captures(self, first: int, count: int) -> bool:
        """Whether a decode run over these slots is one that is captured."""
        return self.capture and first == 0 and count in self.buckets

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Cut ``size`` tokens on top of ``start`` cached ones into pieces [begin, end)."""
        begin = 0
        if not self.prompts_on_cache and start == 0:
            yield 0, size
            begin = size
        while begin < size:
            room = self.max_scores // (start + begin + self.prefill_chunk)
            largest = self.prefill_chunk if self.prompts_on_cache else 1
            end = min(begin + largest, size, begin + max(1, room))
            yield begin, end
            begin = end

    def groups(self, rows: Sequence[tuple[int, int]], context_length: int) -> Iterator[list[int]]:
        """Group rows of several tokens into joint runs, each padded to its longest row.

        Args:
            rows: start and number of tokens of each.
            context_length: no row may end behind it, padding included.

        Yields:
            Indices of the rows of a run.
        """
        group: list[int] = []
        size = 0  # of the longest in the group, which is its first
        for index in sorted(range(len(rows)), key=lambda index: -rows[index][1]):
            start, tokens = rows[index]
            end = start + size
            joins = (
                size - tokens <= self.max_padding
                and tokens >= self.min_joint
                and (len(group) + 1) * size <= self.joint_tokens
                and end <= context_length
                and size * end <= self.max_scores
            )
            if group and not joins:
                yield group
                group = []
            if not group:
                size = tokens
            group.append(index)
        if group:
            yield group

    def ranges(self, slots: Sequence[int], full: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Cut sorted slots into decode runs over slots [first, first + count).

        Args:
            slots: those with a new token, ascending.
            full: per slot of the runner, whether it has no room for the token of a dummy row.
        """
        if not slots:
            return
        bucket = next((size for size in self.buckets if slots[-1] < size <= len(full)), None)
        if bucket is not None and not np.delete(full[:bucket], slots).any():
            yield 0, bucket
            return
        first = last = slots[0]
        for slot in slots[1:]:
            hole = full[last + 1 : slot]
            if len(hole) > self.max_hole or hole.any() or slot - first >= self.max_rows:
                yield first, last + 1 - first
                first = slot
            last = slot
        yield first, last + 1 - first


def powers_of_two(slots: int) -> tuple[int, ...]:
    """Buckets 1, 2, 4, ... and ``slots`` itself."""
    sizes = [1 << exponent for exponent in range(slots.bit_length()) if 1 << exponent < slots]
    return (*sizes, slots)
