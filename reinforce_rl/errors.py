"""Exceptions that end a run, and their exit codes.

Each message says what was found, what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_FINISHED = 0
EXIT_ERROR = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_LOST_RANK = 76
EXIT_DIVERGED = 77
EXIT_ALERT = 78


class ReinforceError(Exception):
    """Base of the package's deliberate errors.

    Scripts print the message and its key, without a traceback.

    Args:
        message: what was found, what was expected, what to do. It may be reworded in any release.
        key: names this kind of error in every release, such as "data.line.not_json". Tests and
            programs compare keys, not messages.
    """

    exit_code = EXIT_ERROR  # of the script that it ends

    def __init__(self, message: str = "", *, key: str = ""):
        super().__init__(message)
        self.key = key

    def with_keys(self) -> str:
        """Return the message as programs print it, with the key in brackets at its end."""
        return _with_key(str(self), self.key)


class Fault(str):
    """A sentence about one fault of a configuration, and the stable key of its kind."""

    key: str

    def __new__(cls, sentence: str, key: str = "") -> Fault:
        fault = super().__new__(cls, sentence)
        fault.key = key
        return fault


def key_of(error: BaseException | str, otherwise: str = "") -> str:
    """Return the key of an error or a fault; `otherwise` if it has none."""
    if isinstance(error, ReinforceError | Fault):
        return error.key or otherwise
    return otherwise


def _with_key(text: str, key: str) -> str:
    return f"{text} [{key}]" if key else text


class StoppedEarly(ReinforceError):
    """The run was asked to stop or its time is up.

    Its state is saved; the same command resumes it.
    """

    exit_code = EXIT_STOPPED


class AlertStop(StoppedEarly):
    """Raised when an alert that is set to stop the run fires.

    The run's state is saved; the same command resumes from there.
    """

    exit_code = EXIT_ALERT


class LostRankError(ReinforceError):
    """Another rank died, failed or hangs. The message names it, its host and its phase.

    Args:
        code_of_lost: exit code that the other rank had sent before it ended; None if it sent none.
    """

    exit_code = EXIT_LOST_RANK

    def __init__(self, message: str = "", *, key: str = "", code_of_lost: int | None = None):
        super().__init__(message, key=key)
        self.code_of_lost = code_of_lost


class DivergedError(ReinforceError):
    """The policy or its gradient is no longer finite. Repeating the run diverges again."""

    exit_code = EXIT_DIVERGED

    def __init__(self, cause: str, *, key: str = ""):
        super().__init__(
            f"{cause}: the policy has diverged, and was not saved. The same command would repeat "
            "it; lower model.optim.lr, or look for what else spoils it, and resume from the last "
            "checkpoint, or from an older one by writing its name into checkpoints/latest",
            key=key,
        )
        self._cause = cause

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str], dict[str, str]]:
        # by default pickled with the whole sentence as the cause
        return type(self), (self._cause,), self.__dict__


class ConfigError(ReinforceError):
    """One or more configuration faults.

    Each names the setting, what was found and what was expected.

    Args:
        faults: sentences, each a `Fault` with its own key. The error's key is the first one's.
    """

    def __init__(self, faults: Sequence[str]):
        self.faults = list(faults)
        first_key = self.keys[0] if self.faults else ""
        super().__init__(self._listed(self.faults), key=first_key)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        # by default pickled with the text, as if that were the faults
        return type(self), (self.faults,)

    @property
    def keys(self) -> list[str]:
        """Return the key of each fault, in their order."""
        return [key_of(fault) for fault in self.faults]

    def with_keys(self) -> str:
        """Return the list of faults, each with its key."""
        return self._listed([_with_key(fault, key_of(fault)) for fault in self.faults])

    @staticmethod
    def _listed(sentences: list[str]) -> str:
        count = len(sentences)
        ending = "" if count == 1 else "s"
        lines = [f"{count} fault{ending} in the configuration:"]
        for number, sentence in enumerate(sentences, start=1):
            lines.append(f"  {number}. {sentence}")
        return "\n".join(lines)


class DiskError(ReinforceError):
    """A file of the run cannot be written, as the disk is full.

    The message names the file and the disk.
    """


class DataError(ReinforceError):
    """A line or file of the data cannot be used. The message names file, line number and reason."""


class CheckpointError(ReinforceError):
    """A checkpoint cannot be read or written. The message names the folder and what is wrong."""


class RewardServerError(ReinforceError):
    """The reward server gave no valid answer within the deadline.

    The message names host and port.
    """


class TooManyFailedRewardsError(RewardServerError):
    """The share of samples that could not be scored exceeds the configured bound."""


class RankLostError(RewardServerError):
    """A rank of the reward server died or hangs, so nothing can be scored.

    The message names rank and host.
    """

    exit_code = EXIT_LOST_RANK


class ModelStuckError(RewardServerError):
    """The reward model has been in one call for too long; its thread may never return."""


class EnvironmentProcessError(ReinforceError):
    """The processes of the environment ended, or could not be started."""


class GenerationError(ReinforceError):
    """The generation engine did not start, or failed again after a restart."""


class EngineLostError(GenerationError):
    """The engine died, timed out or refused its weights. A new engine may succeed."""
