"""Fake GPUs for the deep preflight: a test double in a clone. An installed wheel lacks it.

No other module of the package knows its place.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.paths import IS_CLONE, PACKAGE

if TYPE_CHECKING:
    from helpers.fake_cuda.machine import Machine

TESTS = PACKAGE.parent / "tests"
FAKE_CUDA = "helpers/fake_cuda"  # below `TESTS`


def check_clone() -> None:
    """Raise ConfigError unless this package lies in a clone, with its tests."""
    if IS_CLONE and (TESTS / FAKE_CUDA).is_dir():
        return
    sentence = (
        f"preflight=deep runs ranks on fake GPUs, a helper of the tests that {PACKAGE} does not "
        "include; run it in a clone of the repository after `make install`, or use preflight=true"
    )
    raise ConfigError([Fault(sentence, key="preflight.deep.needs_clone")])


def install() -> Machine:
    """Make this process a machine with fake GPUs, for good, before anything imports torch.

    Raises `helpers.fake_cuda.machine.FakeCudaError` without a compiler, or if torch is imported.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    from helpers.fake_cuda import machine

    return machine.install()


def is_of_fake(file: str) -> bool:
    """Return whether a source file belongs to the fake GPU, not to the code that runs on it."""
    return FAKE_CUDA in file
