"""Golden files: the results of transformers for each family case and a fixed prompt."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FOLDER = Path(__file__).resolve().parents[1] / "exporter" / "golden"
PROMPT_LENGTH, PADDING, NEW_TOKENS, STORED_STEPS = 14, 5, 32, 6
COLUMNS = slice(None, None, 7)  # stored columns of the vocabulary, to keep the files small
LIVE_TOLERANCE = 1e-4


def prompt() -> tuple[Array, Array]:
    """Return two rows of tokens and their mask; the second row is padded on the left."""
    input_ids = np.random.default_rng(5).integers(0, 256, (2, PROMPT_LENGTH))
    attention_mask = np.ones_like(input_ids)
    attention_mask[1, :PADDING] = 0
    return input_ids, attention_mask


def golden_path(case: str) -> Path:
    """Return the path of a case's golden file."""
    return FOLDER / f"{case}.npz"


def transformers_answer(checkpoint: Path) -> dict[str, Array]:
    """Return the results of transformers for the prompt, with greedy decoding and its cache.

    Returns:
        ``prompt_logits`` [2, prompt, columns], ``step_logits`` [2, steps, columns], ``tokens`` [2, new];
        ``margin`` [] is the smallest difference between the best and the second logit.
    """
    import torch
    import transformers

    torch.set_num_threads(1)  # more threads are slower at these sizes
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # transformers' eager attention of Falcon adds ALiBi twice.
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    has_alibi, kind = getattr(config, "alibi", False), transformers.AutoModelForCausalLM
    if config.model_type in ("muse_glimmer",):  # which has no class for text alone
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa" if has_alibi else "eager"
    ).eval()
    # transformers' Gemma 3 reads attn_logit_softcapping but passes it to no layer.
    cap = getattr(model.config, "attn_logit_softcapping", None)
    extra = {"softcap": cap} if cap and model.config.model_type.startswith("gemma3") else {}
    input_ids, mask = (torch.tensor(array) for array in prompt())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    named = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"  # the name up to transformers 5.23
    cache, logits, tokens, margins = None, [], [], []
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            inputs = {"attention_mask": mask, "position_ids": positions, name: cache}
            out = model(input_ids, **inputs, use_cache=True, **extra)
            cache = out[name]
            logits.append(out.logits.numpy())
            best = out.logits[:, -1].topk(2)
            margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
            input_ids = best.indices[:, :1]
            tokens.append(input_ids.numpy())
            mask = torch.cat([mask, torch.ones_like(input_ids)], dim=1)
            positions = positions[:, -1:] + 1
    return {
        "prompt_logits": logits[0][..., COLUMNS],
        "step_logits": np.concatenate(logits[1 : 1 + STORED_STEPS], axis=1)[..., COLUMNS],
        "tokens": np.concatenate(tokens, axis=1),
        "margin": np.array(min(margins)),
    }
