"""The training script of the demo models writes a folder that transformers can run."""

import importlib.util
import json
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "train_demo_model.py"
TINY = shlex.split(
    "--max-steps 2 --max-files 12 --batch 4 --window 64 --context 128 --no-compile "
    "--hidden 64 --layers 2 --heads 2 --kv-heads 1 --ff 128 --vocab 512"
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # where Python finds the modules beside a script
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def trained(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "tiny"
    script.main(["--out", str(out), *TINY])
    return out


def test_the_folder_loads_and_generates(trained: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(trained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    assert model.config.num_key_value_heads == 1
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    text = "import os\n\n\ndef main():\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_the_card_reports_the_held_out_loss(trained: Path) -> None:
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "Held-out loss" in card
    assert "PSF licence" in card
    assert (trained / "heldout.txt").stat().st_size > 1000


def test_the_forward_pass_agrees_with_transformers(script: ModuleType, trained: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32)
    args = script.parse(["--out", str(trained), "--no-compile", "--threads", "1"])
    weights = script.load_file(trained / "model.safetensors")
    tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(0))
    loss, _ = script.Trainer(weights, None, args).gradients(tokens)
    assert loss == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-3)


def test_training_continues_and_distils(script: ModuleType, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "next"
    script.main(["--out", str(out), *TINY, "--init", str(trained), "--teacher", str(trained)])
    assert (out / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 64


def test_batches_are_cut_from_the_files(script: ModuleType) -> None:
    files = [torch.arange(100), torch.arange(100, 200)]
    first = next(script.batches(files, 8, 4, random.Random(0)))
    assert first.shape == (4, 9)
    with pytest.raises(ValueError, match="fewer than a batch of"):
        next(script.batches(files, 8, 400, random.Random(0)))
