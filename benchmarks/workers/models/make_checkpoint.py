"""Write a Hugging Face checkpoint: random weights of a configuration, or the weights of a GGUF file.

    python make_checkpoint.py config.json OUT        bfloat16, seed 0, with a tokenizer
    python make_checkpoint.py model.gguf OUT         float32

Runs in the environment with torch and transformers.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def random_weights(config: Path, out: Path) -> None:
    """Write random weights and a byte-level BPE tokenizer of 8,000 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    torch.manual_seed(0)
    settings = json.loads(config.read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=alphabet
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    tokenizer.train([str(path) for path in files], trainer)
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(out)


def gguf_weights(path: Path, out: Path) -> None:
    """Write the dequantized weights and the tokenizer of a GGUF file."""
    source = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
    del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(out)


if __name__ == "__main__":
    given, target = Path(sys.argv[1]), Path(sys.argv[2])
    (gguf_weights if given.suffix == ".gguf" else random_weights)(given, target)
