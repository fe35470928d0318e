"""The encoder of mT5 (https://arxiv.org/abs/2010.11934): that of T5."""

from .t5 import BASE as BASE
from .t5 import UNUSED as UNUSED
from .t5 import build as build
from .t5 import config as config
