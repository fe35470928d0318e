"""Sound to rows for a decoder, by ``audio.onnx``; results of equal windows are computed once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...exporter.audio_processor import AudioProcessor
from ...providers.base import EncoderOutput
from ..process.kept import Kept
from .features import Spectra

CACHE_BYTES = 128 * 2**20


class AudioEncoder:
    """Turns windows of spectra into rows for cross-attention. Thread-safe.

    Args:
        processor: how sound becomes spectra.
        run: runs ``audio.onnx``: [windows, mels, frames] to [windows, rows, width].
        cache_bytes: most bytes of kept results; the least recently used go first.

    Attributes:
        num_encoded: windows that were computed, which those of the cache are not.
    """

    def __init__(
        self,
        processor: AudioProcessor,
        run: Callable[[Spectra], npt.NDArray[np.float32]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.processor, self._run = processor, run
        self.num_encoded = 0
        self._kept = Kept[EncoderOutput](lambda output: output.states.nbytes, cache_bytes)
        self._lock = threading.Lock()  # one run at a time: each uses all threads

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._kept.clear()

    def encode(self, spectra: Spectra, salt: str = "") -> EncoderOutput:
        """Return the rows of a window [mels, frames]; shorter windows are padded with zeros.

        Args:
            spectra: at most a window.
            salt: only results of the same salt are known, so that time tells no tenant of others' sound.

        Raises:
            ProviderRuntimeError: the run failed.
        """
        missing = self.processor.frames - spectra.shape[1]
        window = np.ascontiguousarray(np.pad(spectra, ((0, 0), (0, missing))), np.float32)
        key = hashlib.blake2b(f"{self.processor} {len(salt)} {salt}".encode(), digest_size=32)
        key.update(window.tobytes())
        name = key.digest()
        with self._lock:
            if (known := self._kept.get(name)) is not None:
                return known
            output = EncoderOutput(name, np.ascontiguousarray(self._run(window[None])[0]))
            self.num_encoded += 1
            self._kept.put(name, output)
            return output
