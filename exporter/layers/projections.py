"""Linear layers, and the ways in which checkpoints store several of them as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from ..decoder import Decoder
from ..weights import Array

View = Callable[[Array], Array]


def linear(
    net: Decoder,
    name: str,
    x: ir.Value,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    stored_in_out: bool = False,
) -> ir.Value:
    """Return x @ W (+ b). The checkpoint stores W as [out, in] (torch.nn.Linear), or as [in, out]."""
    parts = {name: out_features}
    return split_linear(net, name, parts, x, in_features, bias=bias, stored_in_out=stored_in_out)[0]


def split_linear(
    net: Decoder,
    fused: str,
    parts: Mapping[str, int],
    x: ir.Value,
    in_features: int,
    *,
    bias: bool = False,
    stored_in_out: bool = False,
) -> list[ir.Value]:
    """Write several linear layers whose weights the checkpoint stores as one tensor.

    Args:
        net: the graph to write into.
        fused: name of the checkpoint's module.
        parts: out_features of each layer, by name, in the order of the fused tensor.
        x: the input, [..., in_features].
        in_features: width of ``x``.
        bias: whether the module has a bias.
        stored_in_out: whether the checkpoint stores the weight as [in, out] instead of [out, in].

    Returns:
        The output of each part, [..., out_features].
    """
    apart = fused not in parts and all(net.qualified(f"{name}.weight") in net.checkpoint for name in parts)
    if apart:  # as GGUF files have them
        return [linear(net, name, x, in_features, size, bias=bias) for name, size in parts.items()]
    total = sum(parts.values())
    shape = (in_features, total) if stored_in_out else (total, in_features)
    x = net.ordered(f"{fused}.weight", shape, x)
    results, start = [], 0
    for name, size in parts.items():
        part = slice(start, start + size)
        start += size
        view = _columns(part) if stored_in_out else _rows_transposed(part)
        weight = net.product_weight(f"{fused}.weight", shape, view, f"{name}.weight")
        with net.scope(name):
            y = net.op("MatMul", x, weight)
        if bias:
            values = net.weight(f"{fused}.bias", total, view=_elements(part), new_name=f"{name}.bias")
            with net.scope(name):
                y = net.op("Add", y, values)
        results.append(y)
    return results


def selected_linear(
    net: Decoder,
    stored: str,
    name: str,
    x: ir.Value,
    shape: tuple[int, int],
    rows: View,
    *,
    bias: bool = False,
) -> ir.Value:
    """Write a linear layer whose outputs are a selection of those of a stored module.

    Args:
        net: the graph to write into.
        stored: name of the checkpoint's module.
        name: name of the layer.
        x: the input, [..., in].
        shape: shape of the stored weight, [out, in].
        rows: selects or reorders outputs of the stored weight and bias.
        bias: whether the module has a bias.
    """
    x = net.ordered(f"{stored}.weight", shape, x)
    weight = net.product_weight(f"{stored}.weight", shape, _transposed(rows), f"{name}.weight")
    with net.scope(name):
        y = net.op("MatMul", x, weight)
    if not bias:
        return y
    values = net.weight(f"{stored}.bias", shape[0], view=rows, new_name=f"{name}.bias")
    with net.scope(name):
        return net.op("Add", y, values)


def qkv(net: Decoder, x: ir.Value, *, bias: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Compute queries, keys and values of x by three linear layers."""
    hidden, q_size, kv_size = net.config.hidden_size, net.config.q_size, net.config.kv_size
    return (
        linear(net, "q_proj", x, hidden, q_size, bias=bias),
        linear(net, "k_proj", x, hidden, kv_size, bias=bias),
        linear(net, "v_proj", x, hidden, kv_size, bias=bias),
    )


def grouped_qkv(net: Decoder, fused: str, x: ir.Value, *, bias: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Compute queries, keys and values of x by a module that stores them by group of heads.

    Its outputs are [num_kv_heads, num_heads / num_kv_heads + 2, head_dim]: queries, a key and a value.
    """
    c = net.config
    queries = c.num_heads // c.num_kv_heads
    shape = (c.q_size + 2 * c.kv_size, c.hidden_size)
    parts = {"q_proj": slice(queries), "k_proj": slice(-2, -1), "v_proj": slice(-1, None)}
    results = []
    for name, part in parts.items():
        rows = _heads_of_groups(c.num_kv_heads, queries + 2, part)
        results.append(selected_linear(net, fused, name, x, shape, rows, bias=bias))
    return results[0], results[1], results[2]


def _heads_of_groups(groups: int, size: int, part: slice) -> View:
    def view(array: Array) -> Array:
        by_group = array.reshape(groups, size, -1, *array.shape[1:])
        return by_group[:, part].reshape(-1, *array.shape[1:])

    return view


def _transposed(view: View) -> View:
    return lambda array: view(array).T


def _rows_transposed(part: slice) -> View:
    return lambda array: array[part].T


def _columns(part: slice) -> View:
    return lambda array: array[:, part]


def _elements(part: slice) -> View:
    return lambda array: array[part]
