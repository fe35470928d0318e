"""The parts common to all decoders: inputs, outputs, masks and rotary tables. Family files add the layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ..contract import (
    AHEAD_WINDOWS,
    ATTENTION_MASK,
    DEEP_STATES,
    ENCODER_MASK,
    ENCODER_ROWS,
    ENCODER_STATES,
    IMAGE_PAD,
    INPUT_IDS,
    KINDS,
    LOGITS,
    POSITION_IDS,
    ROPE_AXES,
    SEEN_EMBEDDING,
    STATE_KINDS,
    STATES_OPSET,
    past_encoder_name,
    past_name,
    past_state_name,
    present_encoder_name,
    present_name,
    present_state_name,
)
from ..graph_opt.graph.lazy import STORED
from .config import DecoderConfig, RopeConfig
from .graph import OPSET, GraphWriter
from .packed_weights import input_blocks, packed_weight
from .rope import rope_tables
from .weights import Array, Checkpoint

PAST, TOTAL = "past_sequence", "total_sequence"
ENCODER_PAST, ENCODER_TOTAL = "past_encoder_rows", "total_encoder_rows"


class Decoder(GraphWriter):
    """A decoder graph under construction, with its configuration and checkpoint.

    The constructor creates the inputs, ``finish`` the outputs.
    """

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config.model_type, STATES_OPSET if config.states else OPSET)
        self.config = config
        self.checkpoint = checkpoint
        tokens = ("batch", "sequence")
        self.input_ids = self.input(INPUT_IDS, ir.DataType.INT64, tokens)
        self.attention_mask = self.input(ATTENTION_MASK, ir.DataType.INT64, ("batch", TOTAL))
        self.position_ids = self.input(POSITION_IDS, ir.DataType.INT64, tokens)
        attending = [layer for layer in range(config.num_layers) if config.has_attention(layer)]
        # Layers that read another layer's keys and values have no cache. The numbers of layers stay in the
        # names, so that a name says which layer of the checkpoint it belongs to.
        owners = sorted({config.key_value(layer).owner for layer in attending})
        self.past = {
            layer: (self._kv_input(layer, "key"), self._kv_input(layer, "value")) for layer in owners
        }
        shapes = [shape for layer in range(config.num_layers) for shape in self._state_shapes(layer)]
        self.past_states = {
            (layer, kind): self.input(past_state_name(layer, kind), ir.DataType.FLOAT, shape)
            for layer, kind, shape in shapes
        }
        self.encoder_states: ir.Value | None = None
        self._past_encoder: dict[int, tuple[ir.Value, ir.Value]] = {}
        if config.encoder_width:
            self._write_encoder_inputs()
        self._seen_embedding: str | None = None
        self._deep: list[str] = []
        self._packed: dict[str, ir.Value] = {}
        self._ordered: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        self._present: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._present_encoder: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._present_states: dict[tuple[int, str], ir.Value] = {}
        self._encoder_mask: ir.Value | None = None
        self._real: ir.Value | None = None
        self._masks: dict[int | None, ir.Value] = {}
        self._ropes: dict[RopeConfig, tuple[ir.Value, ir.Value]] = {}

    def weight(
        self,
        name: str,
        *shape: int,
        view: Callable[[Array], Array] | None = None,
        new_name: str | None = None,
    ) -> ir.Value:
        """Return the weight ``name`` of the current scope, quantized if the checkpoint stores it so."""
        source, result = self.qualified(name), self.qualified(new_name or name)
        packed = self.checkpoint.packed(source, shape)
        if packed is None:
            return self.initializer(self.checkpoint.tensor(source, shape, view=view, new_name=result))
        if result not in self._packed:
            rows, columns = shape
            self._packed[result] = packed_weight(self, packed, (rows, columns), view or (lambda x: x), result)
        return self._packed[result]

    def product_weight(
        self, name: str, shape: tuple[int, int], view: Callable[[Array], Array], new_name: str
    ) -> ir.Value:
        """Return the weight W [in, out] of products x @ W alone: as ``weight``, or floats that keep blocks.

        Args:
            name: of the stored matrix, in the current scope.
            shape: of the stored matrix.
            view: selects outputs of it, and transposes it if it is stored as [out, in].
            new_name: of the weight, in the current scope.
        """
        source, result = self.qualified(name), self.qualified(new_name)
        packed = self.checkpoint.packed(source, shape)
        kept = packed if packed is not None and self.checkpoint.keeps(packed) else None
        blocks = None if kept is None else input_blocks(kept, shape, view)
        if blocks is None:
            return self.weight(name, *shape, view=view, new_name=new_name)
        tensor = self.checkpoint.tensor(source, shape, view=view, new_name=result)
        tensor.meta[STORED] = blocks
        return self.initializer(tensor)

    def ordered(self, name: str, shape: tuple[int, int], x: ir.Value) -> ir.Value:
        """Return ``x`` [..., in] with its inputs in the order of the stored weight ``name`` [out, in]."""
        packed = self.checkpoint.packed(self.qualified(name), shape)
        if packed is None or packed.order is None:
            return x
        order = self.constant(packed.order, np.int64, "input_order")
        if (x, order) not in self._ordered:
            self._ordered[x, order] = self.op("Gather", x, order, axis=-1)
        return self._ordered[x, order]

    def set_present(self, layer: int, key: ir.Value, value: ir.Value) -> None:
        """Set the present key and value of ``layer``, [batch, kv_heads, total, head_dim]."""
        self._present[layer] = (key, value)

    def with_encoder_rows(self, layer: int, key: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the keys and values of all the encoder's rows, given those of the new ones.

        All are [batch, heads, rows, size]. A sequence brings its rows once; later runs have none that are
        new.
        """
        old = self._past_encoder[layer]
        joined = (
            self.op("Concat", before, new, axis=2) for before, new in zip(old, (key, value), strict=True)
        )
        self._present_encoder[layer] = next(joined), next(joined)
        return self._present_encoder[layer]

    def set_state(self, layer: int, kind: str, state: ir.Value) -> None:
        """Set the present recurrent state of ``layer``; ``kind`` is ``conv`` or ``recurrent``."""
        self._present_states[layer, kind] = state

    def scaled_embedding(self, x: ir.Value) -> ir.Value:
        """Return scaled embeddings x, after recording them if pictures replace their rows."""
        if self.config.image_scale:
            self._seen_embedding = str(x.name)
        return x

    def end_layer(self, layer: int, x: ir.Value) -> ir.Value:
        """Return the states behind ``layer``, after recording them if states of pictures are added there."""
        if layer < self.config.deep_states:
            self._deep.append(str(x.name))
        return x

    def without_padding(self, x: ir.Value) -> ir.Value:
        """Return x [batch, sequence, width] with zeros where ``attention_mask`` is 0.

        A recurrent layer sums up all tokens, so padding must add nothing to its state.
        """
        if self._real is None:
            with self.unscoped("padding"):
                length = self.op("Shape", self.input_ids, start=1, end=2)
                mask = self.op(
                    "Slice", self.attention_mask, self.op("Neg", length), self.ints(2**31 - 1), self.ints(1)
                )
                self._real = self.op("Unsqueeze", self.op("Cast", mask, to=ir.DataType.FLOAT), self.ints(-1))
        return self.op("Mul", x, self._real)

    def present_of_owner(self, layer: int) -> tuple[ir.Value, ir.Value]:
        """Return the present key and value of the layer whose cache ``layer`` reads."""
        return self._present[self.config.key_value(layer).owner]

    def rope(self, config: RopeConfig) -> tuple[ir.Value, ir.Value]:
        """Return the cosines and sines of ``config``; layers with equal configurations share them."""
        if config not in self._ropes:
            with self.unscoped(f"rope_{len(self._ropes)}" if self._ropes else "rope"):
                self._ropes[config] = rope_tables(self, config, self.position_ids)
        return self._ropes[config]

    def mask(self, layer: int) -> ir.Value:
        """Return the additive mask of ``layer``; layers with the same window share it."""
        window = self.config.windows[layer]
        if window not in self._masks:
            with self.unscoped("mask" if window is None else f"mask_window_{window}"):
                self._masks[window] = self._write_mask(window)
        return self._masks[window]

    def encoder_mask(self) -> ir.Value:
        """Return the additive mask of cross-attention, [batch, 1, sequence, rows of the encoder]."""
        if self._encoder_mask is None:
            with self.unscoped("encoder_mask"):
                real = self.input(ENCODER_MASK, ir.DataType.INT64, ("batch", ENCODER_TOTAL))
                real = self.op("Unsqueeze", self.op("Cast", real, to=ir.DataType.BOOL), self.ints(1, 2))
                sequence = self.op("Shape", self.input_ids, start=1, end=2)
                mask = self.op(
                    "Where",
                    real,
                    self.constant(0, np.float32, "visible"),
                    self.constant(np.finfo(np.float32).min, np.float32, "hidden"),
                )
                shape = self.op("Concat", self.ints(1, 1), sequence, self.ints(1), axis=0)
                self._encoder_mask = self.op("Expand", mask, shape)
        return self._encoder_mask

    def finish(self, logits: ir.Value, tokens: int | None = None) -> ir.Model:
        """Add the outputs and return the model.

        Args:
            logits: float32 [batch, sequence, tokens].
            tokens: of how many tokens there are logits, by default of all.
        """
        columns = self.config.vocab_size if tokens is None else tokens
        self.output(logits, LOGITS, ir.DataType.FLOAT, ("batch", "sequence", columns))
        for layer, values in sorted(self._present.items()):
            for value, kind in zip(values, ("key", "value"), strict=True):
                self.output(value, present_name(layer, kind), ir.DataType.FLOAT, self._kv_shape(layer, TOTAL))
        for layer, values in sorted(self._present_encoder.items()):
            for value, kind in zip(values, KINDS, strict=True):
                shape = self._encoder_shape(ENCODER_TOTAL)
                self.output(value, present_encoder_name(layer, kind), ir.DataType.FLOAT, shape)
        for layer in range(self.config.num_layers):
            for _, kind, shape in self._state_shapes(layer):
                state = self._present_states[layer, kind]
                self.output(state, present_state_name(layer, kind), ir.DataType.FLOAT, shape)
        model = self.model()
        facts = {
            ROPE_AXES: self.config.rope_axes,
            DEEP_STATES: self._deep,
            AHEAD_WINDOWS: self.config.image_windows,
        }
        for key, names in facts.items():
            if names:
                model.metadata_props[key] = json.dumps(names)
        if self.config.encoder_rows:
            model.metadata_props[ENCODER_ROWS] = str(self.config.encoder_rows)
        if self._seen_embedding is not None:
            model.metadata_props[SEEN_EMBEDDING] = self._seen_embedding
        if self.config.image_pad is not None:
            model.metadata_props[IMAGE_PAD] = str(self.config.image_pad)
        return model

    def _state_shapes(self, layer: int) -> list[tuple[int, str, tuple[Any, ...]]]:
        """Return layer, kind and shape of each recurrent state of ``layer``."""
        state = self.config.state(layer)
        if state is None:
            return []
        conv, recurrent = STATE_KINDS
        shapes: list[tuple[int, str, tuple[Any, ...]]] = []
        if state.taps > 1:
            shapes.append((layer, conv, ("batch", state.channels, state.taps - 1)))
        if state.heads:
            shapes.append((layer, recurrent, ("batch", state.heads, state.key_size, state.value_size)))
        return shapes

    def _write_encoder_inputs(self) -> None:
        """Add the encoder's new rows, and the keys and values of those before."""
        rows = ("batch", "new_encoder_rows", self.config.encoder_width)
        self.encoder_states = self.input(ENCODER_STATES, ir.DataType.FLOAT, rows)
        shape = self._encoder_shape(ENCODER_PAST)
        for layer in range(self.config.num_layers):
            names = [past_encoder_name(layer, kind) for kind in KINDS]
            key, value = (self.input(name, ir.DataType.FLOAT, shape) for name in names)
            self._past_encoder[layer] = key, value

    def _encoder_shape(self, rows: str) -> tuple[Any, ...]:
        return ("batch", self.config.num_heads, rows, self.config.head_dim)

    def _kv_input(self, layer: int, kind: str) -> ir.Value:
        return self.input(past_name(layer, kind), ir.DataType.FLOAT, self._kv_shape(layer, PAST))

    def _kv_shape(self, layer: int, length: str) -> tuple[Any, ...]:
        sizes = self.config.key_value(layer)
        return ("batch", sizes.heads, length, sizes.size)

    def _write_mask(self, window: int | None) -> ir.Value:
        """Return the mask [batch, 1, sequence, total]: 0 where a query may attend, else the lowest float32.

        With ALiBi it is [batch, heads, sequence, total], and holds each head's bias where a query may attend.

        Query i has cache index past + i. It attends to tokens up to its own index, of the last ``window``
        ones, whose attention_mask is 1.
        """
        zero, one = (self.constant(n, np.int64, str(n)) for n in (0, 1))
        sequence = self.op("Squeeze", self.op("Shape", self.input_ids, start=1, end=2))
        past = self.op("Squeeze", self.op("Shape", next(iter(self.past.values()))[0], start=2, end=3))
        total = self.op("Add", past, sequence)
        keys = self.op("Range", zero, total, one)
        queries = self.op("Unsqueeze", self.op("Range", past, total, one), self.ints(1))
        visible = self.op("LessOrEqual", keys, queries)
        if window is not None:
            oldest = self.op("Sub", queries, self.constant(window, np.int64, "window"))
            visible = self.op("And", visible, self.op("Greater", keys, oldest))
        real = self.op(
            "Unsqueeze", self.op("Cast", self.attention_mask, to=ir.DataType.BOOL), self.ints(1, 2)
        )
        return self.op(
            "Where",
            self.op("And", visible, real),
            self._position_bias() if self.config.alibi_slopes else self.constant(0, np.float32, "visible"),
            self.constant(np.finfo(np.float32).min, np.float32, "hidden"),
        )

    def _position_bias(self) -> ir.Value:
        """Return the ALiBi bias [batch, heads, 1, total]: each head's slope times the keys' positions."""
        ends = self.op("CumSum", self.attention_mask, self.constant(1, np.int64, "1"))
        positions = self.op("Sub", ends, self.constant(1, np.int64, "1"))
        by_head = self.op("Unsqueeze", self.op("Cast", positions, to=ir.DataType.FLOAT), self.ints(1, 2))
        slopes = np.reshape(self.config.alibi_slopes, (1, -1, 1, 1))
        return self.op("Mul", by_head, self.constant(slopes, np.float32, "alibi_slopes"))
