"""The training script of the hybrid writes a folder with which transformers computes what was trained."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))  # where Python finds the modules beside a script
    yield importlib.import_module("train_hybrid_model")
    sys.path.remove(str(TOOLS))


@pytest.mark.long
def test_the_folder_gives_the_logits_of_the_training(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "hybrid"
    sizes = ["--layers", "4", "--ff", "64", "--window", "128", "--batch", "2", "--micro", "2"]
    script.main(["--out", str(out), *sizes, "--max-steps", "2", "--max-files", "12", "--no-compile"])
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    stored = script.load_file(out / "model.safetensors")
    args = script.parse(["--out", str(out), *sizes, "--no-compile"])
    weights = script.as_factors(stored)
    trainer = script.HybridTrainer(weights, weights, model.config, args)
    tokens = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stream = script.rms_norm(trainer.stream(tokens), trainer.weights[script.NORM])
        own = torch.nn.functional.linear(stream, trainer.weights[script.EMBED])
        assert (own - model(tokens).logits).abs().max() < 1e-4 * own.abs().max()
