"""The graph of a text encoder under construction, with its configuration and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ...contract import ATTENTION_MASK, INPUT_IDS, LAST_HIDDEN_STATE, TOKEN_TYPE_IDS
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, RopeConfig
from ..graph import GraphWriter
from ..rope import rope_tables
from ..weights import Array, Checkpoint

_QUICK_GELU = 1.702  # https://github.com/hendrycks/GELUs
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The configuration of an encoder, in one form for all families.

    Args:
        max_tokens: of a text, special tokens included.
        norm_bias: whether LayerNormalization has a bias.
        linear_bias: whether the linear layers of attention and feed-forward layer have a bias.
        token_types: number of types that the input ``token_type_ids`` tells apart; 1 or 0 for no such input.
        windows: per layer, the largest distance of two tokens that attend to each other; None for any.
        ropes: per layer, its rotary embedding; None for none.
        labels: number of classes of a text or token; 0 for a model without a classification head.
        kv_heads: number of heads of keys and values; None for as many as queries have.
        head_size: width of a head; None for ``hidden_size / num_heads``.
        scale: factor of the scores of attention; None for ``head_size ** -0.5``.
        stored_layers: number of layers in the checkpoint, if layers share their weights.
        down_bias: whether the last linear layer of a feed-forward layer has a bias; None for ``mlp_bias``.
        output_size: width of the states of the last layer; None for ``hidden_size``.
        causal: whether a token sees those in front of it only.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    hidden_act: str
    norm_eps: float
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    token_types: int = 0
    windows: tuple[int | None, ...] = ()
    ropes: tuple[RopeConfig | None, ...] = ()
    labels: int = 0
    kv_heads: int | None = None
    head_size: int | None = None
    scale: float | None = None
    stored_layers: int | None = None
    down_bias: bool | None = None
    output_size: int | None = None
    causal: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or the values, of all heads."""
        return (self.kv_heads or self.num_heads) * self.head_dim


class EncoderLayers(GraphWriter):
    """The layers that encoders of texts and of pictures share. Weights have the names of the checkpoint."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config.model_type)
        self.config, self.checkpoint = config, checkpoint

    def weight(self, name: str, *shape: int) -> ir.Value:
        """Return the weight ``name`` of the current scope."""
        return self.initializer(self.checkpoint.tensor(self.qualified(name), shape))

    def table(self, name: str, rows: int, size: int | None = None) -> ir.Value:
        """Return the weight [rows, size] of an embedding, by default of the width of the hidden states."""
        with self.scope(name):
            return self.weight("weight", rows, size or self.config.hidden_size)

    def linear(self, name: str, x: ir.Value, size: int, out: int, *, bias: bool = True) -> ir.Value:
        """Return x W^T (+ b) [..., out] of a ``torch.nn.Linear``; ``size`` is the last axis of x."""
        return self.split_linear(name, ("",), x, size, out, bias=bias)[0]

    def split_linear(
        self, name: str, parts: Sequence[str], x: ir.Value, size: int, out: int, *, bias: bool = True
    ) -> list[ir.Value]:
        """Write linear layers [..., out] whose weights the checkpoint stores as one tensor."""
        results, stored = [], self.qualified(name)
        for number, part in enumerate(parts):
            rows = slice(number * out, (number + 1) * out)
            with self.scope(f"{name}.{part}" if part else name):
                weight = self._part(f"{stored}.weight", "weight", (len(parts) * out, size), rows)
                y = self.op("MatMul", x, weight)
                if bias:
                    y = self.op("Add", y, self._part(f"{stored}.bias", "bias", (len(parts) * out,), rows))
            results.append(y)
        return results

    def _part(self, stored: str, name: str, shape: tuple[int, ...], rows: slice) -> ir.Value:
        """Return the transpose of rows of the tensor ``stored`` as the weight ``name`` of the scope."""
        new = self.qualified(name)
        tensor = self.checkpoint.tensor(stored, shape, view=lambda array: array[rows].T, new_name=new)
        return self.initializer(tensor)

    def layer_norm(self, name: str, x: ir.Value, size: int | None = None) -> ir.Value:
        """Write LayerNormalization (https://arxiv.org/abs/1607.06450) over the last axis.

        Its size is by default the hidden size.
        """
        c = self.config
        with self.scope(name):
            # Checkpoints converted from TensorFlow call weight and bias gamma and beta.
            old = self.qualified("gamma") in self.checkpoint
            names = ("gamma", "beta") if old else ("weight", "bias")
            values = [self.weight(each, size or c.hidden_size) for each in names[: 1 + c.norm_bias]]
            return self.op("LayerNormalization", x, *values, axis=-1, epsilon=c.norm_eps)

    def rms_norm(
        self,
        name: str,
        x: ir.Value,
        size: int | None = None,
        *,
        epsilon: float | None = None,
        view: Callable[[Array], Array] | None = None,
    ) -> ir.Value:
        """Write RMSNormalization (https://arxiv.org/abs/1910.07467) over the last axis.

        Its size and epsilon are by default those of the configuration.
        """
        epsilon = self.config.norm_eps if epsilon is None else epsilon
        with self.scope(name):
            stored = self.checkpoint.tensor(
                self.qualified("weight"), (size or self.config.hidden_size,), view=view
            )
            return self.op("RMSNormalization", x, self.initializer(stored), axis=-1, epsilon=epsilon)

    def activation(self, x: ir.Value, name: str | None = None) -> ir.Value:
        """Apply an activation function, by default ``hidden_act``.

        Raises:
            UnsupportedModelError: the function is not supported.
        """
        name = self.config.hidden_act if name is None else name
        if name in _GELU_TANH:
            return self.op("Gelu", x, approximate="tanh")
        match name:
            case "gelu":
                return self.op("Gelu", x)
            case "relu":
                return self.op("Relu", x)
            case "tanh":
                return self.op("Tanh", x)
            case "quick_gelu":
                factor = self.constant(_QUICK_GELU, np.float32, "quick_gelu")
                return self.op("Mul", x, self.op("Sigmoid", self.op("Mul", x, factor)))
            case "silu" | "swish":
                return self.op("Mul", x, self.op("Sigmoid", x))
        known = ", ".join(("gelu", *_GELU_TANH, "quick_gelu", "relu", "tanh", "silu, swish"))
        raise UnsupportedModelError(f"activation '{name}' is not supported; supported: {known}")


class EncoderWriter(EncoderLayers):
    """The graph of a text encoder: its inputs, outputs, masks and layers."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        tokens = ("batch", "sequence")
        self.input_ids = self.input(INPUT_IDS, ir.DataType.INT64, tokens)
        self.attention_mask = self.input(ATTENTION_MASK, ir.DataType.INT64, tokens)
        self.token_type_ids: ir.Value | None = None
        if config.token_types > 1:
            self.token_type_ids = self.input(TOKEN_TYPE_IDS, ir.DataType.INT64, tokens)
        self._masks: dict[int | None, ir.Value] = {}
        self._distances: dict[int, ir.Value] = {}
        self._biased: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        self._ropes: dict[RopeConfig, tuple[ir.Value, ir.Value]] = {}

    @contextmanager
    def base(self, name: str) -> Iterator[None]:
        """Prefix names with ``name`` and a dot, unless it is empty."""
        if not name:
            yield
            return
        with self.scope(name):
            yield

    def finish(self, states: ir.Value, heads: Mapping[str, tuple[ir.Value, Sequence[int | str]]]) -> ir.Model:
        """Add the outputs and return the model.

        Args:
            states: float32 [batch, sequence, hidden].
            heads: the value and the shape of each further output, float32, by name.
        """
        size = self.config.output_size or self.config.hidden_size
        self.output(states, LAST_HIDDEN_STATE, ir.DataType.FLOAT, ("batch", "sequence", size))
        for name, (value, shape) in heads.items():
            self.output(value, name, ir.DataType.FLOAT, shape)
        return self.model()

    def attention(
        self,
        layer: int,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        bias: ir.Value | None = None,
        kv_heads: int | None = None,
    ) -> ir.Value:
        """Attend, to all tokens unless the configuration says otherwise.

        Args:
            layer: the number of the layer.
            q: queries [batch, sequence, heads * head_dim].
            k: keys [batch, sequence, kv_heads * head_dim].
            v: values of the same shape.
            bias: added to the scores, [1 or batch, heads, sequence, sequence].
            kv_heads: of this layer, if layers differ.
        """
        c = self.config
        rope = c.ropes[layer] if c.ropes else None
        kv_heads = kv_heads or c.kv_heads or c.num_heads
        if rope is not None:
            tables = self._rope(rope)
            q = self.op("RotaryEmbedding", q, *tables, num_heads=c.num_heads)
            k = self.op("RotaryEmbedding", k, *tables, num_heads=kv_heads)
        mask = self._mask(layer)
        if bias is not None:
            key = (mask, bias)  # layers that share both share their sum
            if key not in self._biased:
                self._biased[key] = self.op("Add", mask, bias)
            mask = self._biased[key]
        heads = {"q_num_heads": c.num_heads, "kv_num_heads": kv_heads}
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        return self.op("Attention", q, k, v, mask, **heads, scale=scale)

    def by_distance(self, table: ir.Value, most: int) -> ir.Value:
        """Return the columns of ``table`` [heads, 2 most + 1] by distance, as [1, heads, sequence, sequence].

        The column of a query at i and a key at j is that of max(-most, min(most, j - i)) + most.
        """
        with self.unscoped(f"distances_{most}"):
            rows = self.op("Gather", table, self.distances(most), axis=1)
            return self.op("Unsqueeze", rows, self.ints(0))

    def distances(self, most: int) -> ir.Value:
        """Return max(-most, min(most, j - i)) + most [sequence, sequence] of queries i and keys j."""
        if most not in self._distances:
            with self.unscoped(f"distances_{most}"):
                keys = self.positions()
                distance = self.op("Sub", keys, self.op("Unsqueeze", keys, self.ints(1)))
                ends = [self.constant(n, np.int64, name) for n, name in ((-most, "least"), (most, "most"))]
                self._distances[most] = self.op("Add", self.op("Clip", distance, *ends), ends[1])
        return self._distances[most]

    def split_heads(self, x: ir.Value, heads: int, size: int | None = None) -> ir.Value:
        """Return x [batch, sequence, heads * size] as [batch, sequence, heads, size], by default head_dim."""
        return self.op("Reshape", x, self.ints(0, 0, heads, size or self.config.head_dim))

    def joined_heads(self, x: ir.Value) -> ir.Value:
        """Return x [batch, sequence, heads, head_dim] as [batch, sequence, heads * head_dim]."""
        return self.op("Reshape", x, self.ints(0, 0, -1))

    def first_token(self, x: ir.Value) -> ir.Value:
        """Return x [batch, hidden] of the first token of x [batch, sequence, hidden]."""
        return self.op("Gather", x, self.constant(0, np.int64, "first"), axis=1)

    def positions(self) -> ir.Value:
        """Return 0, 1, ... [sequence]."""
        zero, one = (self.constant(n, np.int64, str(n)) for n in (0, 1))
        with self.unscoped("positions"):
            length = self.op("Squeeze", self.op("Shape", self.input_ids, start=1, end=2))
            return self.op("Range", zero, length, one)

    def mean_token(self, x: ir.Value) -> ir.Value:
        """Return the mean [batch, size] over the tokens of x [batch, sequence, size]."""
        real = self.real_tokens()
        total = self.op("ReduceSum", self.op("Mul", x, real), self.ints(1), keepdims=0)
        return self.op("Div", total, self.op("ReduceSum", real, self.ints(1), keepdims=0))

    def real_tokens(self) -> ir.Value:
        """Return 1 for each token and 0 for padding, float32 [batch, sequence, 1]."""
        real = self.op("Cast", self.attention_mask, to=ir.DataType.FLOAT)
        return self.op("Unsqueeze", real, self.ints(2))

    def _rope(self, config: RopeConfig) -> tuple[ir.Value, ir.Value]:
        if config not in self._ropes:
            with self.unscoped(f"rope_{len(self._ropes)}"):
                positions = self.op("Expand", self.positions(), self.op("Shape", self.input_ids))
                self._ropes[config] = rope_tables(self, config, positions)
        return self._ropes[config]

    def _mask(self, layer: int) -> ir.Value:
        """Return the additive mask [batch, 1, sequence, sequence]: 0, or the lowest float32 if hidden."""
        window = self.config.windows[layer] if self.config.windows else None
        if window not in self._masks:
            with self.unscoped("mask" if window is None else f"mask_window_{window}"):
                self._masks[window] = self._write_mask(window)
        return self._masks[window]

    def _write_mask(self, window: int | None) -> ir.Value:
        seen = self.op("Cast", self.attention_mask, to=ir.DataType.BOOL)
        seen = self.op("Unsqueeze", seen, self.ints(1, 2))
        if window is not None:
            keys = self.positions()
            distance = self.op("Abs", self.op("Sub", keys, self.op("Unsqueeze", keys, self.ints(1))))
            near = self.op("LessOrEqual", distance, self.constant(window, np.int64, "window"))
            seen = self.op("And", near, seen)
        if self.config.causal:
            keys = self.positions()
            before = self.op("LessOrEqual", keys, self.op("Unsqueeze", keys, self.ints(1)))
            seen = self.op("And", before, seen)
        values = [self.constant(0, np.float32, "visible")]
        values += [self.constant(np.finfo(np.float32).min, np.float32, "hidden")]
        mask = self.op("Where", seen, *values)
        if (
            window is None and not self.config.causal
        ):  # onnxruntime 1.32 does not broadcast one row to all queries
            queries = self.op("Shape", self.input_ids, start=1, end=2)
            mask = self.op("Expand", mask, self.op("Concat", self.ints(1, 1), queries, self.ints(1), axis=0))
        return mask


def classify_tokens(net: EncoderWriter, raw: RawConfig, states: ir.Value) -> ir.Value:
    """Write the usual head for token classification: a linear layer. Logits are [batch, sequence, labels]."""
    return net.linear("classifier", states, net.config.hidden_size, net.config.labels)
