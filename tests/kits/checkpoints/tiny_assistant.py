"""Tiny assistants of Gemma 4, and what transformers drafts with them.

Record the drafts, with torch and transformers:
    PYTHONPATH=tests/kits:tests/kits/checkpoints python tests/kits/checkpoints/tiny_assistant.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from exporter_golden import FOLDER
from family_cases import write_case
from safetensors.numpy import save_file
from tiny_layouts import LAYOUTS

Array = npt.NDArray[Any]

TARGETS = ("gemma4_text", "gemma4", "gemma4_unified_text")
GOLDEN = FOLDER / "draft_heads" / "gemma4_assistants.json"
DRAFTED = 4
HIDDEN = 24
TEXTS = [np.random.default_rng(40 + length).integers(0, 250, length).tolist() for length in (2, 5, 9, 17, 33)]


def write_assistant(folder: Path, target: Path, **overrides: Any) -> Path:
    """Write a random assistant for a tiny checkpoint of Gemma 4."""
    model = json.loads((target / "config.json").read_text())
    text = model.get("text_config") or model
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    changed = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_kv_shared_layers": len(layer_types),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "rms_norm_eps": 1e-6,
    }
    text = {**text, "model_type": "gemma4_text", **changed}
    raw = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": model.get("text_config", model)["hidden_size"],
        "text_config": text,
        "tie_word_embeddings": True,
        **overrides,
    }
    shapes = LAYOUTS["gemma4_text"][1](text)
    for name in list(shapes):
        if any(part in name for part in ("k_proj", "v_proj", "k_norm", "lm_head")):
            del shapes[name]
    shapes["pre_projection.weight"] = (HIDDEN, 2 * raw["backbone_hidden_size"])
    shapes["post_projection.weight"] = (raw["backbone_hidden_size"], HIDDEN)
    rng = np.random.default_rng(33)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * (0.1 if "embed" in name else 0.4) + (len(shape) == 1)
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def transformers_drafts(target: Path, assistant: Path) -> list[dict[str, Any]]:
    """Return what an assistant drafts behind each text, and the smallest margin of a draft.

    The last token has no keys and values, as in ``SinglePositionMultiTokenCandidateGenerator``.
    """
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(target, **options).eval()
    drafter = kind.from_pretrained(assistant, **options).eval()
    embed, found = model.get_input_embeddings(), []
    for tokens in TEXTS:
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            run = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
            state, token, drafted, margin = run.hidden_states[-1][:, -1:], ids[:, -1:], [], np.inf
            for _ in range(DRAFTED):
                answer = drafter(
                    inputs_embeds=torch.cat([embed(token), state], -1),
                    position_ids=torch.tensor([[len(tokens) - 1]]),
                    shared_kv_states=run.shared_kv_states,
                    use_cache=False,
                )
                best = answer.logits[0, -1].sort().values
                margin = min(margin, float(best[-1] - best[-2]))
                token, state = answer.logits.argmax(-1), answer.last_hidden_state
                drafted.append(int(token))
        found.append({"tokens": tokens, "drafted": drafted, "margin": round(margin, 5)})
    return found


def main() -> None:
    """Record the drafts for all targets."""
    recorded = {}
    for case in TARGETS:
        with tempfile.TemporaryDirectory() as place:
            target = write_case(case, Path(place) / "target")
            recorded[case] = transformers_drafts(target, write_assistant(Path(place) / "assistant", target))
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
