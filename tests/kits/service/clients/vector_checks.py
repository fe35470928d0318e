"""What the scripts of clients of vectors share: the services by model, and their texts."""

from __future__ import annotations

import json
import sys

# "all" has every model by its name; the others serve one model each, for clients that name none.
URLS: dict[str, str] = json.loads(sys.argv[1])
TEXTS = ["the capital of France", "b", "cats sleep"]
KEY = "none"
