"""The policy by which a slot runner cuts a step into runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ...records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """How a slot runner cuts a step into runs. The defaults were measured on the CPU.

    Args:
        prefill_chunk: maximum prompt tokens of one run, so that intermediate tensors stay small.
        max_scores: maximum attention scores [tokens of the chunk, tokens so far] of a run; long contexts get
            smaller chunks.
        max_hole: maximum idle slots between two slots of a decode run. On the CPU one idle slot costs no more
            than another run, which reads all weights again; two cost more.
        max_rows: maximum slots of a decode run.
        joint_tokens: maximum tokens of the prompts of several rows in one run, padding included.
        max_padding: maximum padding of a row in such a run, in tokens; more would cost more than another run.
        buckets: sizes of decode runs that start at slot 0, ascending; a run is padded to the next size. Empty
            runs exactly the used slots. Devices that replay captured runs need few sizes.
        bank: slots [0, bank), [bank, 2 bank), ... are the only decode runs of several rows, and each run is
            padded to the whole bank. 0 for any runs.
        capture: capture decode runs in buckets, or in banks, once and replay them; only the content of their
            inputs may change.
        prompts_on_cache: whether several tokens of a row may run on top of cached ones. If not, only new
            prompts run in one piece, and rows that continue a cache run token by token.
        joint_prompts: new prompts in adjacent slots share a run, within ``joint_tokens`` and ``max_padding``.
    """

    prefill_chunk: int = 128
    max_scores: int = 2**21
    max_hole: int = 1
    joint_tokens: int = 512
    max_padding: int = 16
    max_rows: int = 2**31
    buckets: tuple[int, ...] = ()
    bank: int = 0
    capture: bool = False
    prompts_on_cache: bool = True
    joint_prompts: bool = False

    def captures(self, first: int, count: int) -> bool:
        """Whether a decode run over these slots is captured."""
        return self.capture and (self.bank > 0 or (first == 0 and count in self.buckets))

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield chunks [begin, end) of ``size`` tokens after ``start`` cached ones."""
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

    def adjacent(self, prompts: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Group new prompts of adjacent slots into joint runs, each padded to its longest prompt.

        Args:
            prompts: slot and number of tokens of each, by ascending slot.

        Yields:
            Indices of the prompts of a run.
        """
        group: list[int] = []
        for index, (slot, _) in enumerate(prompts):
            sizes = [prompts[other][1] for other in (*group, index)]
            joins = (
                group
                and slot == prompts[index - 1][0] + 1
                and max(sizes) - min(sizes) <= self.max_padding
                and len(sizes) * max(sizes) <= self.joint_tokens
            )
            if group and not joins:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def ranges(self, slots: Sequence[int], full: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Yield decode runs over slots [first, first + count).

        Args:
            slots: slots with a new token, ascending.
            full: [slots of the runner], whether a slot has no room for the token of a dummy row.
        """
        if not slots:
            return
        if self.bank:
            yield from self._banks(slots, full)
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

    def _banks(self, slots: Sequence[int], full: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        for first in sorted({slot // self.bank * self.bank for slot in slots}):
            bank = range(first, min(first + self.bank, len(full)))
            rows = [slot for slot in slots if slot in bank]
            dummies_fit = not any(full[slot] for slot in bank if slot not in rows)
            if len(rows) > 1 and dummies_fit:
                yield first, len(bank)
            else:
                yield from ((slot, 1) for slot in rows)


def powers_of_two(slots: int) -> tuple[int, ...]:
    """Return the buckets 1, 2, 4, ... and ``slots`` itself."""
    sizes = [1 << exponent for exponent in range(slots.bit_length()) if 1 << exponent < slots]
    return (*sizes, slots)
