"""Read weights in the layout of carryall's kernels, element by element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from carryall.graph_opt.lower.products.tiles import LAYOUT


def attributes(node: ir.Node) -> dict[str, int]:
    return {name: value.as_int() for name, value in node.attributes.items()}


def decoded(node: ir.Node) -> npt.NDArray[np.float32]:
    """Return the weight [outputs, inputs] that the tiles of a node hold, read element by element."""
    tiles = node.inputs[1]
    assert tiles is not None
    assert tiles.const_value is not None
    data, facts = tiles.const_value.numpy(), attributes(node)
    assert facts["layout"] == LAYOUT
    bits, size, blocks = facts["bits"], facts["block_size"], -(-facts["inputs"] // facts["block_size"])
    value_bytes = 16 * size * bits // 8
    block_bytes = value_bytes + (0 if facts["group_size"] else 128 if facts["offsets"] == 2 else 64)
    groups = -(-blocks * size // facts["group_size"]) if facts["group_size"] else 0
    multiples = blocks * block_bytes + 64 * groups
    points = multiples + (16 * blocks if groups else 0)
    result = np.empty((facts["outputs"], facts["inputs"]), np.float32)
    for n in range(facts["outputs"]):
        tile, c = data[n // 16], n % 16
        for k in range(facts["inputs"]):
            block, i = tile[k // size * block_bytes :], k % size
            if bits == 8:
                value = int(block[i // 4 * 64 + 4 * c + i % 4])
            else:
                value = int(block[i // 8 * 64 + 4 * c + i % 4]) >> (4 * (i % 8 // 4)) & 15
            if groups:
                first = blocks * block_bytes + k // facts["group_size"] * 64
                factors = tile[first : first + 64].view(np.float32) * tile[multiples + k // size * 16 + c]
            else:
                factors = block[value_bytes:block_bytes].view(np.float32)
            zero = {0: 1 << (bits - 1), 2: 0}.get(facts["offsets"])
            if zero is None:
                zero = int(tile[points + k // size * 16 + c])
            result[n, k] = np.float32(value - zero) * factors[c]
            if facts["offsets"] == 2:
                result[n, k] += factors[16 + c]
    return result
