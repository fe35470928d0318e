"""``audio.onnx`` of Whisper (https://arxiv.org/abs/2212.04356): log-mel spectra to rows for the decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from ...contract import AUDIO_FEATURES, AUDIO_STATES
from ...errors import CheckpointError, UnsupportedModelError
from ..config import RawConfig, integer, with_defaults
from ..encoders.encoder import EncoderConfig, EncoderLayers
from ..models.whisper import DEFAULTS
from ..weights import Checkpoint

if TYPE_CHECKING:
    from ..audio_processor import AudioProcessor

_TAPS = 3  # of both convolutions
_STRIDE = 2  # of the second


def audio_config(raw: RawConfig) -> EncoderConfig:
    """Return the configuration of the encoder.

    Raises:
        CheckpointError: a size is missing or wrong.
        UnsupportedModelError: the heads do not divide the width.
    """
    raw = with_defaults(raw, DEFAULTS)
    width, heads = integer(raw, "d_model"), integer(raw, "encoder_attention_heads")
    if not heads or width % heads:
        raise UnsupportedModelError(
            f"'d_model' {width} must be a multiple of 'encoder_attention_heads' {heads}"
        )
    return EncoderConfig(
        model_type="whisper_audio",
        vocab_size=0,
        hidden_size=width,
        intermediate_size=integer(raw, "encoder_ffn_dim"),
        num_layers=integer(raw, "encoder_layers"),
        num_heads=heads,
        max_tokens=integer(raw, "max_source_positions"),
        hidden_act=str(raw["activation_function"]),
        norm_eps=1e-5,
    )


def check_processor(processor: AudioProcessor, raw: RawConfig) -> None:
    """Check that windows of a processor fit the encoder.

    Raises:
        CheckpointError: they do not.
    """
    mels, positions = integer(with_defaults(raw, DEFAULTS), "num_mel_bins"), audio_config(raw).max_tokens
    if (processor.mels, processor.frames) != (mels, _STRIDE * positions):
        raise CheckpointError(
            f"windows of {processor.frames} spectra of {processor.mels} bands do not fit config.json, whose "
            "encoder "
            f"takes {_STRIDE * positions} of {mels}"
        )


def audio_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights.

    It maps float32 [windows, mels, 2 * positions] to [windows, positions, width].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    net = EncoderLayers(audio_config(raw), checkpoint)
    c, mels = net.config, integer(with_defaults(raw, DEFAULTS), "num_mel_bins")
    features = net.input(AUDIO_FEATURES, ir.DataType.FLOAT, ("windows", mels, _STRIDE * c.max_tokens))
    with net.scope("model.encoder"):
        x = net.activation(_convolution(net, "conv1", features, mels, 1))
        x = net.activation(_convolution(net, "conv2", x, c.hidden_size, _STRIDE))
        x = net.op("Transpose", x, perm=[0, 2, 1])
        x = net.op("Add", x, net.table("embed_positions", c.max_tokens))
        for layer in range(c.num_layers):
            with net.scope(f"layers.{layer}"):
                x = _layer(net, x)
        x = net.layer_norm("layer_norm", x)
    net.output(x, AUDIO_STATES, ir.DataType.FLOAT, ("windows", c.max_tokens, c.hidden_size))
    return net.model()


def _convolution(net: EncoderLayers, name: str, x: ir.Value, channels: int, stride: int) -> ir.Value:
    hidden = net.config.hidden_size
    with net.scope(name):
        weight, bias = net.weight("weight", hidden, channels, _TAPS), net.weight("bias", hidden)
        return net.op("Conv", x, weight, bias, kernel_shape=[_TAPS], pads=[1, 1], strides=[stride])


def _layer(net: EncoderLayers, x: ir.Value) -> ir.Value:
    c, width = net.config, net.config.hidden_size
    normed = net.layer_norm("self_attn_layer_norm", x)
    with net.scope("self_attn"):
        q, v = (net.linear(name, normed, width, width) for name in ("q_proj", "v_proj"))
        k = net.linear("k_proj", normed, width, width, bias=False)
        heads = {"q_num_heads": c.num_heads, "kv_num_heads": c.num_heads}
        attended = net.op("Attention", q, k, v, **heads, scale=c.head_dim**-0.5)
        x = net.op("Add", x, net.linear("out_proj", attended, width, width))
    normed = net.layer_norm("final_layer_norm", x)
    inside = net.activation(net.linear("fc1", normed, width, c.intermediate_size))
    return net.op("Add", x, net.linear("fc2", inside, c.intermediate_size, width))
