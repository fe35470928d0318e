"""The program of a chain, as ``providers/native/sources/chain_program.h`` describes it."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..paged_kv import LAYOUT as CACHES
from ..products.tiles import LAYOUT as TILES

VERSION = 5
ABSENT = -(1 << 63)
ADD, NORM, GATE, PART, LINEAR, ATTENTION, MULTIPLY, CENTER, ACTIVATE, NEAR_ATTENTION, SUM, JOIN = range(12)


def float_bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class ChainProgram:
    """Writes the steps of a chain, and places its values in registers.

    Args:
        outputs: the values that are read outside of the chain.
        last_reads: by value, the number of the last node of the chain that reads it.
    """

    def __init__(self, outputs: list[tuple[ir.Value, int]], last_reads: dict[ir.Value, int]) -> None:
        self.inputs: list[ir.Value] = []
        self._widths = [width for _, width in outputs]
        self._outputs = len(outputs)
        self._places = {value: -1 - index for index, (value, _) in enumerate(outputs)}
        self._last_reads = last_reads
        self._free: dict[int, list[int]] = defaultdict(list)  # registers by width
        self._held: list[tuple[int, int]] = []  # the last reader of a register, and the register
        self._node = 0  # whose steps are added
        self._steps: list[list[int]] = []
        self.lead = -1

    def step(self, kind: int, *operands: int) -> None:
        """Add a step."""
        self._steps.append([kind, *operands])

    def input(self, value: ir.Value | None) -> int:
        """Return the place of a value from outside; ABSENT for None."""
        if value is None:
            return ABSENT
        if value not in self._places:
            self._places[value] = len(self.inputs)
            self.inputs.append(value)
        return self._places[value]

    def rows(self, value: ir.Value | None) -> int:
        """Return the place of rows that an earlier step has written, or that come from outside."""
        place = self.input(value)
        if place >= 0 and self.lead < 0:
            self.lead = place
        return place

    def out(self, value: ir.Value, width: int, over: Sequence[int] = ()) -> int:
        """Return the register of a step's result.

        Args:
            value: the result.
            width: its columns.
            over: places of operands of which the step reads no element after it has written the same element
                of its result. If no later node reads one, its register becomes the result's: its rows are in
                a cache.
        """
        if value not in self._places:
            register = self._register(width, over)
            self._places[value] = -1 - register
            self._held.append((self._last_reads[value], register))
        return self._places[value]

    def scratch(self, width: int, over: Sequence[int] = ()) -> int:
        """Return a register that only the steps of one node read, see ``out``."""
        register = self._register(width, over)
        self._held.append((-1, register))
        return -1 - register

    def view(self, value: ir.Value, width: int) -> int:
        """Return a register for a part of another value."""
        self._places[value] = -1 - self._new(-width)
        return self._places[value]

    def end(self, node: int) -> None:
        """Free the registers that no node after number ``node`` reads."""
        for last, register in self._held:
            if last <= node:
                self._free[self._widths[register]].append(register)
        self._held = [each for each in self._held if each[0] > node]
        self._node = node + 1

    def tensor(self) -> npt.NDArray[np.int64]:
        """Return the program [n]."""
        sizes = [len(self._widths), self._outputs, len(self._steps)]
        header = [VERSION, TILES, CACHES, self.lead, *sizes, *self._widths]
        return np.array([*header, *(number for step in self._steps for number in step)], np.int64)

    def _register(self, width: int, over: Sequence[int]) -> int:
        for last, register in self._held:
            if last <= self._node and -1 - register in over and self._widths[register] == width:
                self._held.remove((last, register))
                return register
        return self._free[width].pop() if self._free[width] else self._new(width)

    def _new(self, width: int) -> int:
        self._widths.append(width)
        return len(self._widths) - 1
