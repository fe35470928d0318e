"""Golden file of Whisper: the results of transformers for a tiny checkpoint and two sounds.

``python tests/kits/whisper_golden.py``, with torch and transformers, records it again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent / "checkpoints"))

from tiny_whisper import ENGLISH, START, TRANSCRIBE, UNTIMED, sound, write_whisper

Array = npt.NDArray[Any]
PATH = Path(__file__).resolve().parents[1] / "exporter" / "golden" / "whisper.npz"
TIMES_PATH = PATH.with_name("whisper_times.npz")
SEED = 3
BEGINNING = [START, ENGLISH, TRANSCRIBE, UNTIMED]
NEW_TOKENS = 32
# Whisper's own search takes log-probabilities behind the rules, which transformers does by this option.
BEAMS = {"num_beams": 3, "renormalize_logits": True}


def sounds() -> list[npt.NDArray[np.float32]]:
    """Return a sound of a whole window, and one that ends with silence."""
    return [sound(2.0, 1), np.concatenate([sound(1.3, 2), np.zeros(11_200, np.float32)])]


def transformers_answer(checkpoint: Path) -> dict[str, Array]:
    """Return what transformers makes of the sounds.

    Returns:
        ``features`` [2, mels, frames]; ``states`` [2, rows, width]; ``logits`` [2, tokens, vocab] of
        ``tokens``, which are the beginning and 32 tokens chosen greedily; ``timed`` and ``untimed`` [2, n],
        what ``generate`` writes with and without times, padded with the end, and ``timed_beams`` and
        ``untimed_beams``, what it writes with 3 beams; ``margin``, the smallest difference of the best two
        logits.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    features = np.stack([extractor._np_extract_fbank_features(each[None], "cpu")[0] for each in sounds()])
    heard = torch.tensor(features)
    tokens = torch.tensor([BEGINNING] * 2)
    margins = []
    with torch.inference_mode():
        states = model.model.encoder(heard).last_hidden_state
        for _ in range(NEW_TOKENS):
            logits = model(input_features=heard, decoder_input_ids=tokens, use_cache=False).logits
            best = logits[:, -1].topk(2)
            margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
            tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
        written = {
            name: model.generate(
                heard,
                return_timestamps=timed,
                language="en",
                task="transcribe",
                do_sample=False,
                max_new_tokens=32,
                **beams,
            )
            for name, timed, beams in (
                ("timed", True, {}),
                ("untimed", False, {}),
                ("timed_beams", True, BEAMS),
                ("untimed_beams", False, BEAMS),
            )
        }
    return {
        "features": features,
        "states": states.numpy(),
        "tokens": tokens.numpy(),
        "logits": logits.numpy(),
        **{name: ids.numpy() for name, ids in written.items()},
        "margin": np.array(min(margins)),
    }


def transformers_times(checkpoint: Path) -> dict[str, Array]:
    """Return what transformers tells of the times of tokens.

    Returns:
        ``sequences`` [2, n], with the prompt and padded with the end, and ``times`` [2, n], seconds at which
        each token ends.
    """
    import torch
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for each in sounds():
        features = torch.tensor(extractor._np_extract_fbank_features(each[None], "cpu"))
        with torch.inference_mode():
            found.append(
                model.generate(
                    features,
                    return_timestamps=True,
                    return_token_timestamps=True,
                    language="en",
                    task="transcribe",
                    do_sample=False,
                    max_new_tokens=32,
                )
            )
    rows = {"sequences": "sequences", "times": "token_timestamps"}
    return {
        f"{name}{number}": each[key][0].numpy()
        for number, each in enumerate(found)
        for name, key in rows.items()
    }


def main() -> None:
    """Record the file."""
    with tempfile.TemporaryDirectory() as folder:
        times: dict[str, Any] = dict(transformers_times(write_whisper(Path(folder), SEED)))
    np.savez_compressed(TIMES_PATH, **times)
    with tempfile.TemporaryDirectory() as folder:
        answer = transformers_answer(write_whisper(Path(folder), SEED))
    print(f"smallest margin {float(answer['margin']):.1e}")
    for name in ("timed", "untimed", "tokens"):
        print(name, answer[name].tolist())
    stored: dict[str, Any] = {name: value for name, value in answer.items() if name != "margin"}
    np.savez_compressed(PATH, **stored)


if __name__ == "__main__":
    main()
