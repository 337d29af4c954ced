"""Exceptions that end a run, and their exit codes. Each message says what was found, what was expected, what to do."""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_ERROR = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_LOST_RANK = 76
EXIT_DIVERGED = 77
EXIT_SENTINEL = 78


class ReinforceError(Exception):
    """Base of the package's deliberate errors. Scripts print the message without a traceback."""

    exit_code = EXIT_ERROR  # of the script that it ends


class StoppedEarly(ReinforceError):
    """The run was asked to stop or its time is up. Its state is saved; the same command resumes it."""

    exit_code = EXIT_STOPPED


class SentinelStop(StoppedEarly):
    """A rule of the sentinel that may stop the run spoke. Its state is saved; the same command goes on from there."""

    exit_code = EXIT_SENTINEL


class LostRankError(ReinforceError):
    """Another rank died, failed or hangs. The message names it, its host and its phase."""

    exit_code = EXIT_LOST_RANK


class DivergedError(ReinforceError):
    """The policy or its gradient is no longer finite. Repeating the run diverges again."""

    exit_code = EXIT_DIVERGED

    def __init__(self, found: str):
        super().__init__(
            f"{found}: the policy has diverged, and was not saved. The same command would repeat it; lower "
            "model.optim.lr, or look for what else spoils it, and go on from the last checkpoint, or from an older "
            "one by writing its name into checkpoints/latest"
        )


class ConfigError(ReinforceError):
    """One or more configuration faults, each naming the key, what was found and what was expected."""

    def __init__(self, faults: list[str]):
        self.faults = list(faults)
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  {i}. {fault}" for i, fault in enumerate(self.faults, 1))]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.faults,)  # by default pickled with the text, as if that were the faults


class DiskError(ReinforceError):
    """A file of the run cannot be written, as the disk is full. The message names the file and the disk."""


class DataError(ReinforceError):
    """A line or file of the data cannot be used. The message names file, line number and reason."""


class CheckpointError(ReinforceError):
    """A checkpoint cannot be read or written. The message names the folder and what is wrong."""


class RewardServerError(ReinforceError):
    """The reward server gave no valid answer within the deadline. The message names host and port."""


class TooManyFailedRewardsError(RewardServerError):
    """The share of samples that could not be scored exceeds the configured bound."""


class RankLostError(RewardServerError):
    """A rank of the reward server died or hangs, so nothing can be scored. The message names rank and host."""

    exit_code = EXIT_LOST_RANK


class ModelStuckError(RewardServerError):
    """The reward model has been in one call for too long; its thread may never return."""


class GenerationError(ReinforceError):
    """The generation engine did not start, or failed again after a restart."""


class EngineLostError(GenerationError):
    """The engine died, timed out or refused its weights. A new engine may succeed."""
