"""XLM-RoBERTa (https://arxiv.org/abs/1911.02116), also multilingual E5 and BGE-M3."""

from .roberta import BASE as BASE
from .roberta import UNUSED as UNUSED
from .roberta import build as build
from .roberta import classify as classify
from .roberta import config as config
