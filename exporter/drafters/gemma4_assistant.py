"""Gemma 4's assistants: layers that attend to the keys and values of the model's last layers of each kind.

The drafter reads the states that enter these layers and computes the same keys and values once more, with the
model's own weights; so it needs no other runner's memory. Its queries are those of the token behind: one
position ahead of the newest key. All tokens of a proposal are drafted at that position.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from ...contract import HIDDEN_STATES, LAST_HIDDEN_STATE
from ...errors import UnsupportedModelError
from ...records import dataclass
from .. import layers
from ..config import DecoderConfig, KeyValueConfig, RawConfig, integer, mapping
from ..decoder import Decoder
from ..family import normalised_config
from ..models import gemma4_text
from ..rope import turned_by_one
from .drafter import TARGET, Drafter, num_layers_of, text_config

# Its configuration states that all layers share keys and values, and none has an embedding of its own.
_OWN_LAYERS = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1}


@dataclass(frozen=True)
class Gemma4Assistant(Drafter):
    """An assistant of Gemma 4.

    The columns of ``hidden_states`` are the model's last hidden state, or the assistant's own in its place,
    then the states that enter the layers whose keys and values it reads.
    """

    def layers(self, target: RawConfig) -> tuple[int, ...]:
        """See ``Drafter``: for each kind of its layers, the model's last one with keys of its own."""
        num_layers_of(target)
        return tuple(owner for owner, _ in self._owners(target).values())

    def config(self) -> DecoderConfig:
        """See ``Drafter``. The first layer of each kind appends to the cache."""
        normal = gemma4_text.config({**self._text, **_OWN_LAYERS})
        if any(each is not None for each in normal.experts):
            raise UnsupportedModelError(f"{self.folder} has experts, which no assistant of Gemma 4 has")
        firsts = [normal.windows.index(window) for window in normal.windows]
        key_values = tuple(
            dataclasses.replace(normal.key_value(layer), owner=first) for layer, first in enumerate(firsts)
        )
        # As in transformers, whose mask counts distances up to the window, from the newest key.
        windows = tuple(None if window is None else window + 1 for window in normal.windows)
        return dataclasses.replace(normal, key_values=key_values, windows=windows, final_softcap=None)

    def write(self, net: Decoder, target: RawConfig) -> ir.Value:
        """See ``Drafter``. Logits are of all tokens: the clusters that restrict them only save time."""
        c, width = net.config, integer(self.raw, "backbone_hidden_size")
        found = integer(text_config(target), "hidden_size")
        if found != width:
            raise UnsupportedModelError(
                f"{self.folder} drafts for models with a hidden size of {width}, not of {found}"
            )
        net.checkpoint.ignore("masked_embedding.", "lm_head.weight", "rotary_emb.inv_freq")
        owners = self._owners(target)
        count = len(owners)
        states = net.input(HIDDEN_STATES, ir.DataType.FLOAT, ("batch", "sequence", width * (1 + count)))
        last, *entering = net.ops(
            "Split", states, net.ints(*[width] * (1 + count)), num_outputs=1 + count, axis=-1
        )
        with net.scope(f"{TARGET}embed_tokens"):
            vocabulary = integer(text_config(target), "vocab_size")
            embedded = net.op("Gather", net.weight("weight", vocabulary, width), net.input_ids)
            embedded = layers.scaled(net, embedded, math.sqrt(width))
        both = net.op("Concat", embedded, last, axis=-1)
        x = layers.linear(net, "pre_projection", both, 2 * width, c.hidden_size)
        by_window = dict(zip(owners, entering, strict=True))
        for layer, window in enumerate(c.windows):
            with net.scope(f"model.layers.{layer}"):
                normed = layers.rms_norm(net, "input_layernorm", x)
                y = self._attention(net, layer, normed, by_window[window], owners[window])
                x = gemma4_text.behind_attention(net, layer, x, y)
                x = net.op("Mul", x, net.weight("layer_scalar", 1))
        x = layers.rms_norm(net, "model.norm", x)
        own = layers.linear(net, "post_projection", x, c.hidden_size, width)
        net.output(own, LAST_HIDDEN_STATE, ir.DataType.FLOAT, ("batch", "sequence", width))
        return layers.lm_head(net, x, embedding_name="model.embed_tokens")

    @property
    def _text(self) -> RawConfig:
        return {"model_type": "gemma4_text", **mapping(self.raw, "text_config")}

    def _owners(self, target: RawConfig) -> dict[int | None, tuple[int, KeyValueConfig]]:
        """Return the model's layer, and its keys and values, by the window of the assistant's layers.

        Raises:
            UnsupportedModelError: the model has none of a kind, or of another size or rotation.
        """
        own, model = self.config(), normalised_config(target)
        owners: dict[int | None, tuple[int, KeyValueConfig]] = {}
        for layer, window in enumerate(own.windows):
            of_model = None if window is None else window - 1
            same = [n for n in range(model.num_layers) if model.windows[n] == of_model]
            number = max((n for n in same if model.key_value(n).owner == n), default=0)
            keys, wanted = model.key_value(number), own.key_value(layer)
            fits = (keys.heads, keys.size) == (wanted.heads, wanted.size)
            if not number or not fits or own.ropes[layer] != model.ropes[number]:
                raise UnsupportedModelError(
                    f"{self.folder} does not draft for this model: it reads {wanted.heads} heads of "
                    f"{wanted.size} elements with window {of_model}, which no layer behind the first has"
                )
            owners[window] = number, keys
        return owners

    def _attention(
        self, net: Decoder, layer: int, x: ir.Value, states: ir.Value, owner: tuple[int, KeyValueConfig]
    ) -> ir.Value:
        """Attend with queries of x to the keys and values of the model's layer that ``states`` enter."""
        c, kv, rope = net.config, net.config.key_value(layer), net.config.ropes[layer]
        number, of_model = owner
        assert rope is not None  # noqa: S101 -- every layer of Gemma 4 has one
        with net.scope("self_attn"):
            q = turned_by_one(net, rope, gemma4_text.queries(net, layer, x), c.num_heads)
        if kv.owner == layer:
            with net.unscoped(f"{TARGET}layers.{number}"):
                width = integer(self.raw, "backbone_hidden_size")
                normed = layers.rms_norm(net, "input_layernorm", states, width)
                with net.scope("self_attn"):
                    k, v = gemma4_text.keys_and_values(net, of_model, normed, width)
        with net.scope("self_attn"):
            if kv.owner == layer:
                out = layers.attention(net, layer, q, k, v)
            else:
                out = layers.attention_to_owner(net, layer, q)
            return layers.linear(net, "o_proj", out, c.num_heads * kv.size, c.hidden_size)
