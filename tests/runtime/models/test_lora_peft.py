"""Adapters compute what PEFT computes with them: chosen by request, and merged at export."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from own_environment import python_with, smollm2_gguf
from tiny_lora import layers_of, write_adapter
from tiny_models import write_tiny

from carryall import export
from carryall.providers.base import Row, Runner
from carryall.runtime.models.loading import load_model

PROMPT = np.array([5, 9, 200, 41, 7, 7, 90, 13, 54, 33])
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {"p": (4, ("q_proj", "v_proj")), "q": (2, PROJECTIONS)}
REQUIREMENTS = ("torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "gguf==0.19.0")
TOLERANCE = 1e-4  # of the largest logit

CONVERT = """
import json, pathlib, sys
import safetensors.torch, torch, transformers
file, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
auto, source = transformers.AutoModelForCausalLM, {"gguf_file": file.name}
model = auto.from_pretrained(file.parent, **source, dtype=torch.float32)
config = model.config.to_dict()
config.pop("quantization_config", None)
weights = {name: one.contiguous() for name, one in model.state_dict().items() if name != "lm_head.weight"}
out.mkdir()
(out / "config.json").write_text(json.dumps(config))
safetensors.torch.save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
transformers.AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(out)
"""

PEFT = """
import sys
import numpy as np, peft, torch, transformers
base, out, tokens, *names = sys.argv[1:]
ids = torch.tensor([[int(token) for token in tokens.split(",")]])
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
folder = base.rpartition("/")[0]
wrapped = peft.PeftModel.from_pretrained(model, f"{folder}/{names[0]}", adapter_name=names[0])
for name in names[1:]:
    wrapped.load_adapter(f"{folder}/{name}", adapter_name=name)
found = {}
with torch.no_grad():
    for name in names:
        wrapped.set_adapter(name)
        found[name] = wrapped(ids).logits[0].numpy()
    with wrapped.disable_adapter():
        found["base"] = wrapped(ids).logits[0].numpy()
np.savez(out, **found)
"""


def run_script(python: Path, script: str, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def logits(runner: Runner, lora: int | None) -> npt.NDArray[np.float32]:
    return np.array(runner.forward([Row(0, PROMPT, 0, len(PROMPT), lora=lora)])[0])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spread"), [("llama", 0.3), ("qwen2", 0.3), ("smollm2", 0.05)])
def test_logits_are_those_of_peft(
    family: str, spread: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT runs in an environment of its own, with adapters that it does not merge."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    python, base = python_with(*REQUIREMENTS), tmp_path / "base"
    if family == "smollm2":
        run_script(python, CONVERT, str(smollm2_gguf()), str(base))
    else:
        write_tiny(family, base, dtype=np.float32)
    layers = layers_of(base)
    for seed, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        chosen = {module: shape for module, shape in layers.items() if module.endswith(modules)}
        targets = {"target_modules": list(modules), "use_rslora": True}
        write_adapter(tmp_path / name, chosen, seed=seed, rank=rank, spread=spread, **targets)
    tokens, file = ",".join(map(str, PROMPT)), tmp_path / "logits.npz"
    run_script(python, PEFT, str(base), str(file), tokens, *ADAPTERS)
    expected = dict(np.load(file))
    with_adapters = load_model(base, loras={name: tmp_path / name for name in ADAPTERS}, max_slots=1)
    found = {"base": logits(with_adapters.runner, None)}
    for place, name in enumerate(ADAPTERS):
        with_adapters.runner.load_lora(place, with_adapters.adapters.get(name).matrices)
        found[name] = logits(with_adapters.runner, place)
    with_adapters.close()
    for name in ADAPTERS:
        package = export(base, tmp_path / f"merged {name}", adapter=tmp_path / name).path
        merged = load_model(package, max_slots=1)
        found[f"{name} merged"] = logits(merged.runner, None)
        merged.close()
    for name, got in found.items():
        of_peft = expected[name.removesuffix(" merged")]
        np.testing.assert_allclose(got, of_peft, rtol=0, atol=TOLERANCE * np.abs(of_peft).max(), err_msg=name)
    least = min(np.abs(expected[name] - expected["base"]).max() for name in ADAPTERS)
    assert least > 100 * TOLERANCE * np.abs(expected["base"]).max()
