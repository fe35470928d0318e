"""A checkpoint's config.json: its files, its values, and ``DecoderConfig``, one form for all families."""

from .context import TRAINED_LENGTHS, context_lengths, states_length
from .decoder import SCORES, decoder_config, layer_windows, rope_config, ropes_of_types
from .files import CONFIG_FILE, GENERATION_FILE, read_config, read_generation_config, read_json, stated_token
from .types import (
    DecoderConfig,
    ExpertsConfig,
    KeyValueConfig,
    LatentConfig,
    LayerInputConfig,
    MambaConfig,
    RopeConfig,
    StateConfig,
)
from .values import (
    LENGTH_KEYS,
    MAX_LAYERS,
    MAX_POSITIONS,
    RawConfig,
    decoder_values,
    integer,
    mapping,
    module_name,
    number,
    text_config,
    with_defaults,
)

__all__ = [
    "CONFIG_FILE",
    "GENERATION_FILE",
    "LENGTH_KEYS",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "SCORES",
    "TRAINED_LENGTHS",
    "DecoderConfig",
    "ExpertsConfig",
    "KeyValueConfig",
    "LatentConfig",
    "LayerInputConfig",
    "MambaConfig",
    "RawConfig",
    "RopeConfig",
    "StateConfig",
    "context_lengths",
    "decoder_config",
    "decoder_values",
    "integer",
    "layer_windows",
    "mapping",
    "module_name",
    "number",
    "read_config",
    "read_generation_config",
    "read_json",
    "rope_config",
    "ropes_of_types",
    "stated_token",
    "states_length",
    "text_config",
    "with_defaults",
]
