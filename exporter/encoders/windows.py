"""Windows of the states of pictures of one size, so that states attend to those of their window alone."""

from __future__ import annotations

import onnx_ir as ir

from .encoder import EncoderLayers


class Windows:
    """Cuts states into square windows. States are [pictures * height * width, hidden].

    Args:
        net: the graph to write into.
        size: rows of states, and states of a row.
        hidden: elements of a state.
        edge: states of an edge of a window.
    """

    def __init__(self, net: EncoderLayers, size: tuple[int, int], hidden: int, edge: int) -> None:
        self.net, self.size, self.hidden, self.edge = net, size, hidden, edge
        self.rows, self.columns = (-(-each // edge) for each in size)

    def cut(self, x: ir.Value, shift: int = 0) -> ir.Value:
        """Return windows [pictures * windows, edge * edge, hidden], row by row; what is missing is zeros.

        With a shift, rows and columns begin with number ``shift``; those before it come last.
        """
        net, edge = self.net, self.edge
        x = padded(net, self.grid(x), (self.rows * edge, self.columns * edge), self.size)
        x = self._rolled(x, shift)
        x = net.op("Reshape", x, net.ints(-1, self.rows, edge, self.columns, edge, self.hidden))
        x = net.op("Transpose", x, perm=[0, 1, 3, 2, 4, 5])
        return net.op("Reshape", x, net.ints(-1, edge**2, self.hidden))

    def put_back(self, x: ir.Value, shift: int = 0) -> ir.Value:
        """Return the states of windows, as ``cut`` took them."""
        net, edge, (height, width) = self.net, self.edge, self.size
        x = net.op("Reshape", x, net.ints(-1, self.rows, self.columns, edge, edge, self.hidden))
        x = net.op("Transpose", x, perm=[0, 1, 3, 2, 4, 5])
        shape = net.ints(-1, self.rows * edge, self.columns * edge, self.hidden)
        x = self._rolled(net.op("Reshape", x, shape), -shift)
        if (self.rows * edge, self.columns * edge) != self.size:
            x = net.op("Slice", x, net.ints(0, 0), net.ints(height, width), net.ints(1, 2))
        return net.op("Reshape", x, net.ints(-1, self.hidden))

    def grid(self, x: ir.Value) -> ir.Value:
        """Return states as [pictures, height, width, hidden]."""
        return self.net.op("Reshape", x, self.net.ints(-1, *self.size, self.hidden))

    def _rolled(self, x: ir.Value, shift: int) -> ir.Value:
        """Return x [pictures, height, width, hidden] from row and column ``shift`` on, then the others."""
        if not shift:
            return x
        net = self.net
        for axis in (1, 2):
            parts = [
                net.op("Slice", x, net.ints(begin), net.ints(end), net.ints(axis))
                for begin, end in ((shift, 2**31 - 1), (0, shift))
            ]
            x = net.op("Concat", *parts, axis=axis)
        return x


def padded(net: EncoderLayers, x: ir.Value, size: tuple[int, int], real: tuple[int, int]) -> ir.Value:
    """Return x [pictures, rows, columns, hidden], of ``real`` rows and columns, with zeros behind them."""
    below, beside = size[0] - real[0], size[1] - real[1]
    if not below and not beside:
        return x
    return net.op("Pad", x, net.ints(0, 0, 0, 0, 0, below, beside, 0))
