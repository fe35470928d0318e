"""The layers of decoder families, in the canonical forms of docs/contract.md.

Weight names are those of the checkpoint, relative to the current scope. Experts are in ``experts.py``.
"""

from .cached_attention import attention as attention
from .cached_attention import attention_to_owner as attention_to_owner
from .cached_attention import attention_with_sinks as attention_with_sinks
from .cached_attention import cross_attention as cross_attention
from .cached_attention import rotated as rotated
from .cross_decoders import cross_decoder_layer as cross_decoder_layer
from .decoders import embedding as embedding
from .decoders import lm_head as lm_head
from .decoders import post_norm_decoder as post_norm_decoder
from .decoders import pre_norm_decoder as pre_norm_decoder
from .decoders import pre_norm_layer as pre_norm_layer
from .elementwise import activation as activation
from .elementwise import scaled as scaled
from .elementwise import softcap as softcap
from .feed_forward import gated_linear_unit as gated_linear_unit
from .feed_forward import gated_mlp as gated_mlp
from .feed_forward import plain_mlp as plain_mlp
from .norms import head_norm as head_norm
from .norms import layer_norm as layer_norm
from .norms import plain_rms_norm as plain_rms_norm
from .norms import rms_norm as rms_norm
from .projections import View as View
from .projections import grouped_qkv as grouped_qkv
from .projections import linear as linear
from .projections import qkv as qkv
from .projections import selected_linear as selected_linear
from .projections import split_linear as split_linear
