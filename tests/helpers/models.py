"""The real model that several tests share."""

from __future__ import annotations

import functools
from pathlib import Path

from reinforce_rl.tools.smollm2 import DEFAULT_FOLDER, prepare_smollm2

ROOT = Path(__file__).parents[2]


@functools.cache
def smollm2_folder() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct below the repository's root, made now if it is missing.

    Making it takes about 20 s, so a session pays for it once and later sessions not at all.
    """
    return prepare_smollm2(ROOT / DEFAULT_FOLDER)
