"""CamemBERT (https://arxiv.org/abs/1911.03894): the layers of RoBERTa."""

from .roberta import BASE as BASE
from .roberta import UNUSED as UNUSED
from .roberta import build as build
from .roberta import classify as classify
from .roberta import classify_tokens as classify_tokens
from .roberta import config as config
from .roberta import vocabulary as vocabulary
