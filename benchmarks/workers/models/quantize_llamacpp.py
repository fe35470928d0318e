"""Write a GGUF file as Q4_K_M: ``python quantize_llamacpp.py model.gguf OUT.gguf``."""

from __future__ import annotations

import sys

import llama_cpp as llama

parameters = llama.llama_model_quantize_default_params()
parameters.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_K_M
parameters.allow_requantize = True
sys.exit(llama.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), parameters))
