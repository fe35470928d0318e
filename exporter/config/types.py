"""The configuration of a decoder, in one form for all families."""

from __future__ import annotations

import math

from ...records import dataclass

DRAFTED_TOKENS = 65_536  # of a larger vocabulary, whose product would cost most of a draft head


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary position embedding. Which fields are used depends on ``rope_type``; see ``rope.py``.

    ``interleaved`` rotates pairs of adjacent elements instead of elements of both halves. ``proportional``
    turns only the first ``turning_dim`` of ``rotary_dim`` elements: the frequencies of the others are 0.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    turning_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A sparse mixture of experts.

    Args:
        scope: the layer's name in the checkpoint.
        count: number of experts.
        per_token: number of experts that each token is routed to (top-k).
        width: intermediate size of an expert.
        normalize: whether the routing weights of a token are scaled to sum to 1.
        names: names of an expert's gate, up and down projections in the checkpoint.
        shared: intermediate size of the shared expert, which every token uses and a sigmoid gate scales; 0
            for none.
        groups: number of groups of experts; a token's experts are those of its best groups.
        groups_per_token: number of groups that each token's experts come from.
        scale: factor of the routing weights.
        alpha: factor inside the sigmoid of an expert's SiLU.
        limit: bound of an expert's gate and up projections.
        corrected: whether a bias of each expert takes part in the selection, not in the weights.
        tolerance: how far below the best score, relative to it, others share the weight, in such families.
        latent: elements of what experts read and give, projected before and behind; 0 for the hidden size.
    """

    scope: str
    count: int
    per_token: int
    width: int
    normalize: bool
    names: tuple[str, str, str]
    shared: int = 0
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    alpha: float = 1.0
    limit: float = math.inf
    corrected: bool = False
    tolerance: float = 0.0
    latent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Args:
        query_rank: width of the compressed queries; None if they are not compressed.
        key_value_rank: width of the compressed keys and values.
        rotary: elements of a key head with a rotary embedding, which all heads share.
        plain: elements of a key head without one.
        value: elements of a value head.
    """

    query_rank: int | None
    key_value_rank: int
    rotary: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueConfig:
    """The keys and values of a layer.

    Args:
        heads: number of heads of keys and of values.
        size: elements of a head, of queries too.
        owner: the layer that computes and caches them: the layer itself or an earlier one.
        one_projection: whether one projection gives both keys and values.
    """

    heads: int
    size: int
    owner: int
    one_projection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The recurrent state of a layer.

    Args:
        channels: channels of its short convolution.
        taps: inputs that the convolution sees, the newest included.
        bias: whether the convolution has a bias.
        heads: heads of its linear attention; 0 for none.
        key_heads: heads of queries and keys, of which each serves ``heads / key_heads`` heads.
        key_size: elements of a head of keys.
        value_size: elements of a head of values.
        in_turns: whether heads of keys serve heads of values in turns, not groups of neighbours.
        projection_bias: whether the projections in front of the convolution have biases.
        output_bias: whether the last projection has a bias.
        lowest_decay: bound of the logarithm of decay, in families that have one; None for none.
    """

    channels: int
    taps: int
    bias: bool = False
    heads: int = 0
    key_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    in_turns: bool = False
    projection_bias: bool = False
    output_bias: bool = False
    lowest_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(StateConfig):
    """A layer of Mamba-2 (Dao and Gu, https://arxiv.org/abs/2405.21060): ``heads`` of ``value_size`` inputs.

    Args:
        norm: whether RMSNorm by group of heads (of ``key_heads``) follows.
        norm_first: whether the norm is in front of the gate, not behind it.
        fastest: the longest time step; infinite for no bound.
        slowest: the shortest time step.
        input_scale: factor of the layer's input.
        scales: factors of the gate, the inputs, B, C and the time steps, behind their projection.
        output_scale: factor of the layer's output.
    """

    norm: bool = True
    norm_first: bool = False
    fastest: float = math.inf
    slowest: float = 0.0
    input_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputConfig:
    """Embeddings of each layer beside those of the decoder (per-layer embeddings of Gemma).

    Args:
        vocab_size: rows of their table.
        width: elements for each layer.
    """

    vocab_size: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder, in one form for all families.

    Args:
        windows: per layer, the size of its sliding attention window; None for full attention.
        ropes: per layer, its rotary embedding; None for none.
        experts: per layer, its mixture of experts; None for one feed-forward layer.
        embedding_scale: factor of the embeddings.
        embedding_norm: whether LayerNormalization follows the embeddings and positions.
        sinusoid_start: the place of the first token among sinusoidal positions; None for other positions.
        residual_scale: factor of the output of attention and of the feed-forward layer.
        logits_scale: factor of the logits.
        parallel_residual: whether attention and the feed-forward layer read the same residual sum.
        alibi_slopes: per query head, the factor of a key's position that is added to its score (ALiBi,
            https://arxiv.org/abs/2108.12409); empty for none.
        embedding_width: width of the embedding if it is projected to the hidden size; None if it is not.
        latent: latent attention; None for attention without compression.
        unused_layers: number of layers behind the decoder's in the checkpoint, for speculation.
        norm_first: whether norms are in front of attention and of the feed-forward layer, not behind them.
        key_values: per layer, its keys and values; empty if every layer has its own, of equal sizes. Layers
            that read the cache of another follow all that have one.
        mlp_widths: per layer, its intermediate size; empty if it is ``intermediate_size`` in all.
        layer_input: embeddings of each layer; None for none.
        states: per layer, its recurrent state, None for none; empty if no layer has one.
        attends: per layer, whether it has attention; empty if those without a state have.
        attention_scales: factors of the input, the keys and the output of attention.
        mlp_scales: factors of the gate and of the output of feed-forward layers.
        output_bias: whether the output of attention has a bias; None if ``attention_bias`` is for it too.
        head_norms: whether each query and key head has a norm, in families where not all models have.
        head_gates: whether each head of attention has a gate, in such families.
        norms_behind: whether norms follow each part too, in such families.
        post_norm_eps: epsilon of these norms if it is another one.
        query_growth: factor of the logarithm by which queries grow beyond the trained length.
        rope_axes: by rotary frequency, the axis of positions that it turns with for tokens of pictures; empty
            if positions have one axis.
        deep_states: number of first layers behind which states of pictures are added.
        image_scale: whether the states of pictures replace embeddings behind their scale, not in front of it.
        image_pad: the token that embeddings of each layer have in place of those of pictures.
        image_windows: windows, or None, of the layers in which tokens of a picture see those behind them.
        encoder_width: width of the encoder's rows, to which each layer attends too; 0 without an encoder.
        encoder_rows: the most of these rows.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    experts: tuple[ExpertsConfig | None, ...]
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    sinusoid_start: int | None = None
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    parallel_residual: bool = False
    alibi_slopes: tuple[float, ...] = ()
    embedding_width: int | None = None
    norm_first: bool = True
    latent: LatentConfig | None = None
    unused_layers: int = 0
    key_values: tuple[KeyValueConfig, ...] = ()
    mlp_widths: tuple[int, ...] = ()
    layer_input: LayerInputConfig | None = None
    states: tuple[StateConfig | None, ...] = ()
    attends: tuple[bool, ...] = ()
    attention_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    output_bias: bool | None = None
    head_norms: bool = False
    head_gates: bool = False
    norms_behind: bool = False
    post_norm_eps: float | None = None
    query_growth: float = 0.0
    rope_axes: tuple[int, ...] = ()
    deep_states: int = 0
    image_scale: bool = False
    image_pad: int | None = None
    image_windows: tuple[int | None, ...] = ()
    encoder_width: int = 0
    encoder_rows: int = 0

    def key_value(self, layer: int) -> KeyValueConfig:
        """Return the keys and values of ``layer``."""
        if self.key_values:
            return self.key_values[layer]
        return KeyValueConfig(heads=self.num_kv_heads, size=self.head_dim, owner=layer)

    def state(self, layer: int) -> StateConfig | None:
        """Return the recurrent state of ``layer``; None if it has none."""
        return self.states[layer] if self.states else None

    def has_attention(self, layer: int) -> bool:
        """Whether ``layer`` has attention."""
        return self.attends[layer] if self.attends else self.state(layer) is None

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of ``layer``'s feed-forward layer."""
        return self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size

    @property
    def drafted_tokens(self) -> int:
        """From how many tokens, the first ones, a draft head chooses."""
        return min(self.vocab_size, DRAFTED_TOKENS)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim
