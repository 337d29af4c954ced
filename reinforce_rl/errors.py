"""The errors that end a run, each with a text that says what was found, what was expected and what to do."""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_ERROR = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_LOST_RANK = 76
EXIT_DIVERGED = 77


class ReinforceError(Exception):
    """Base of every error that this package raises on purpose. Scripts print its text without a traceback.

    Attributes:
        exit_code: of a script that ends by it.
    """

    exit_code = EXIT_ERROR


class StoppedEarly(ReinforceError):
    """The run was asked to stop, or its time is used up. What was done is saved; the same command goes on."""

    exit_code = EXIT_STOPPED


class LostRankError(ReinforceError):
    """Another rank died, failed or hangs. The text names it, its host and its phase."""

    exit_code = EXIT_LOST_RANK


class DivergedError(ReinforceError):
    """The policy is not finite, or gives no finite gradient any more. A run that is repeated diverges again."""

    exit_code = EXIT_DIVERGED

    def __init__(self, found: str):
        super().__init__(
            f"{found}: the policy has diverged, and was not saved. The same command would repeat it; lower "
            "model.optim.lr, or look for what else spoils it, and go on from the last checkpoint, or from an older "
            "one by writing its name into checkpoints/latest"
        )


class ConfigError(ReinforceError):
    """One or more faults of a configuration, all reported together.

    Args:
        faults: one sentence a fault, each naming the key, what was found and what was expected.
    """

    def __init__(self, faults: list[str]):
        self.faults = list(faults)
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  {i}. {fault}" for i, fault in enumerate(self.faults, 1))]))


class DataError(ReinforceError):
    """A line or a file of the data cannot be used. The text names file, line number and reason."""


class CheckpointError(ReinforceError):
    """A checkpoint cannot be read or written. The text names the folder and what is wrong with it."""


class RewardServerError(ReinforceError):
    """The reward server did not answer as it should within the deadline. The text names host and port."""


class TooManyFailedRewardsError(RewardServerError):
    """The share of samples that the reward server could not score is above the configured bound."""


class RankLostError(RewardServerError):
    """A rank of the reward server died or hangs: nothing can be scored any more. The text names rank and host."""

    exit_code = EXIT_LOST_RANK


class ModelStuckError(RewardServerError):
    """The reward server's model has been in one call for too long, which its thread may never leave."""


class GenerationError(ReinforceError):
    """The generation engine cannot go on: it did not start, or failed again after it was started anew."""


class EngineLostError(GenerationError):
    """An engine that died, did not answer in time or refused its weights. A new one may do better."""
