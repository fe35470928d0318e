"""The graph of a text encoder under construction, with its configuration and checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...contract import ATTENTION_MASK, INPUT_IDS, LAST_HIDDEN_STATE, LOGITS, TOKEN_TYPE_IDS
from ...errors import UnsupportedModelError
from ..config import RopeConfig
from ..graph import GraphWriter
from ..rope import rope_tables
from ..weights import Checkpoint

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
        labels: number of classes of a text; 0 for a model without a classification head.
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

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


class EncoderLayers(GraphWriter):
    """The layers that encoders of texts and of pictures share. Weights have the names of the checkpoint."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config.model_type)
        self.config, self.checkpoint = config, checkpoint

    def weight(self, name: str, *shape: int) -> ir.Value:
        """Return the weight ``name`` of the current scope."""
        return self.initializer(self.checkpoint.tensor(self.qualified(name), shape))

    def table(self, name: str, rows: int) -> ir.Value:
        """Return the weight [rows, hidden] of an embedding."""
        with self.scope(name):
            return self.weight("weight", rows, self.config.hidden_size)

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


class Encoder(EncoderLayers):
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
        self._ropes: dict[RopeConfig, tuple[ir.Value, ir.Value]] = {}

    @contextmanager
    def base(self, name: str) -> Iterator[None]:
        """Prefix names with ``name`` and a dot, unless it is empty."""
        if not name:
            yield
            return
        with self.scope(name):
            yield

    def finish(self, states: ir.Value, logits: ir.Value | None) -> ir.Model:
        """Add the outputs and return the model.

        Args:
            states: float32 [batch, sequence, hidden].
            logits: float32 [batch, labels]; None for a model without a classification head.
        """
        size = self.config.hidden_size
        self.output(states, LAST_HIDDEN_STATE, ir.DataType.FLOAT, ("batch", "sequence", size))
        if logits is not None:
            self.output(logits, LOGITS, ir.DataType.FLOAT, ("batch", self.config.labels))
        return self.model()

    def attention(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """Attend without a causal mask; all are [batch, sequence, hidden]."""
        c = self.config
        rope = c.ropes[layer] if c.ropes else None
        if rope is not None:
            q, k = (self.op("RotaryEmbedding", x, *self._rope(rope), num_heads=c.num_heads) for x in (q, k))
        heads = {"q_num_heads": c.num_heads, "kv_num_heads": c.num_heads}
        return self.op("Attention", q, k, v, self._mask(layer), **heads, scale=c.head_dim**-0.5)

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
        """Return the mean [batch, hidden] over the tokens of x [batch, sequence, hidden]."""
        real = self.op("Cast", self.attention_mask, to=ir.DataType.FLOAT)
        kept = self.op("Mul", x, self.op("Unsqueeze", real, self.ints(2)))
        total = self.op("ReduceSum", kept, self.ints(1), keepdims=0)
        return self.op("Div", total, self.op("ReduceSum", real, self.ints(1)))

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
        values = [self.constant(0, np.float32, "visible")]
        values += [self.constant(np.finfo(np.float32).min, np.float32, "hidden")]
        mask = self.op("Where", seen, *values)
        if window is None:  # onnxruntime 1.32 does not broadcast one row to all queries
            queries = self.op("Shape", self.input_ids, start=1, end=2)
            mask = self.op("Expand", mask, self.op("Concat", self.ints(1, 1), queries, self.ints(1), axis=0))
        return mask
