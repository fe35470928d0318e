"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a layer that reads states of three layers of the model.

Folders are those of the EAGLE repository and of SpecForge. Attention reads the normed embedding of a token
and the normed state in front of it, one behind the other. The head chooses from a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import HIDDEN_STATES, LAST_HIDDEN_STATE
from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer
from ..decoder import Decoder
from ..weights import Array
from .drafter import TARGET, Drafter, num_layers_of, text_config

_COUNT = 3  # of layers whose states it reads
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"
_TOKENS = "d2t"  # what is to be added to a number of the smaller vocabulary


@dataclass(frozen=True)
class Eagle3(Drafter):
    """A head of EAGLE-3.

    The columns of ``hidden_states`` are a state of its own, then those of the model's layers. One of both
    is zero: the projection of the model's states is added to the own state.
    """

    def layers(self, target: RawConfig) -> tuple[int, ...]:
        """See ``Drafter``. Ids in ``eagle_config`` are of layers whose output is read, others of inputs."""
        count = num_layers_of(target)
        nested = self.raw.get("eagle_config")
        outputs = nested.get(_LAYER_IDS) if isinstance(nested, Mapping) else None
        inputs: Any = self.raw.get(_LAYER_IDS) if outputs is None else [each + 1 for each in outputs]
        numbers = (2, count // 2, count - _COUNT) if inputs is None else tuple(inputs)
        if len(numbers) != _COUNT or not all(
            isinstance(each, int) and 1 <= each <= count for each in numbers
        ):
            raise UnsupportedModelError(
                f"{self.folder} reads the states that enter layers {list(numbers)} of a model with {count}; "
                f"supported: {_COUNT} layers from 1 on"
            )
        return numbers

    def config(self) -> DecoderConfig:
        """See ``Drafter``. Its vocabulary is the smaller one."""
        normal = decoder_config(self.raw)
        if normal.num_layers != 1:
            raise UnsupportedModelError(f"{self.folder} has {normal.num_layers} layers; EAGLE-3 has one")
        vocabulary = integer(self.raw, "draft_vocab_size", normal.vocab_size)
        return replace(normal, vocab_size=vocabulary, tie_word_embeddings=False)

    def write(self, net: Decoder, target: RawConfig) -> ir.Value:
        """See ``Drafter``. The graph returns the layer's output, before the norm, to be read next."""
        c, names = net.config, ("input_layernorm", "hidden_norm")
        net.checkpoint.ignore("t2d", _TOKENS, "rotary_emb.inv_freq")
        width = integer(self.raw, "target_hidden_size", integer(text_config(target), "hidden_size"))
        states = net.input(
            HIDDEN_STATES, ir.DataType.FLOAT, ("batch", "sequence", c.hidden_size + _COUNT * width)
        )
        sizes = net.ints(c.hidden_size, _COUNT * width)
        own, of_model = net.ops("Split", states, sizes, num_outputs=2, axis=-1)
        x = net.op("Add", own, layers.linear(net, "fc", of_model, _COUNT * width, c.hidden_size))
        with net.scope("midlayer"):
            normed = [
                layers.rms_norm(net, name, y) for name, y in zip(names, (self._embedded(net), x), strict=True)
            ]
            x = net.op("Add", x, self._attention(net, net.op("Concat", *normed, axis=-1)))
            y = layers.rms_norm(net, "post_attention_layernorm", x)
            x = net.op("Add", x, layers.gated_mlp(net, 0, y))
        logits = layers.linear(net, "lm_head", layers.rms_norm(net, "norm", x), c.hidden_size, c.vocab_size)
        net.output(x, LAST_HIDDEN_STATE, ir.DataType.FLOAT, ("batch", "sequence", c.hidden_size))
        return logits

    def draft_tokens(self) -> Array | None:
        """See ``Drafter``."""
        stored = self.tensors.get(_TOKENS)
        count = self.config().vocab_size
        if stored is None:
            if count != integer(self.raw, "vocab_size"):
                raise CheckpointError(f"{self.folder} has a smaller vocabulary, but no tensor '{_TOKENS}'")
            return None
        if stored.shape != (count,):
            raise CheckpointError(f"tensor '{_TOKENS}': expected shape [{count}], found {list(stored.shape)}")
        tokens: Array = np.arange(count) + stored.array().astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= integer(self.raw, "vocab_size"):
            raise CheckpointError(f"tensor '{_TOKENS}' names tokens outside the vocabulary")
        return tokens

    def _embedded(self, net: Decoder) -> ir.Value:
        """Look up tokens in its own embedding, or else in the model's."""
        name = _EMBEDDING if _EMBEDDING in net.checkpoint else f"{TARGET}{_EMBEDDING}"
        with net.unscoped(name.removesuffix(".weight")):
            table = net.weight("weight", net.checkpoint.shape(name)[0], net.config.hidden_size)
            return net.op("Gather", table, net.input_ids)

    def _attention(self, net: Decoder, x: ir.Value) -> ir.Value:
        """Grouped-query attention of x [batch, sequence, 2 * hidden]."""
        c = net.config
        with net.scope("self_attn"):
            sizes = {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}
            bias = net.qualified("q_proj.bias") in net.checkpoint
            q, k, v = (
                layers.linear(net, name, x, 2 * c.hidden_size, n, bias=bias) for name, n in sizes.items()
            )
            return layers.linear(net, "o_proj", layers.attention(net, 0, q, k, v), c.q_size, c.hidden_size)
