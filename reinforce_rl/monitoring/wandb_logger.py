"""Metrics and sample tables to Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.errors import ReinforceError
from reinforce_rl.monitoring.base import SUCCESS
from reinforce_rl.utils.files import plain_number

_START_DEADLINE_S = 90.0
_FINISH_DEADLINE_S = 120.0


class WandbLogger:
    """A wandb run. wandb itself is imported here and nowhere else.

    A resumed run passes the `run_id` of its checkpoint and goes on in the same wandb run. wandb accepts no step below
    its last one, so steps that a killed run had logged after its last checkpoint keep the killed run's values; on one
    process those are the same values.

    Args:
        project: wandb's project.
        name: the run's name there.
        dir: folder below which wandb writes its `wandb/`.
        config: the run's configuration, shown there.
        run_id: of the run to go on with; None starts a new one.
        mode: "offline" keeps everything in `dir`, for a later `wandb sync`; "online" needs an API key.
        entity: user or team; None is the account's default.
        group: joins runs, e.g. the seeds of one experiment.
        tags: shown there.

    Raises:
        ReinforceError: wandb is not installed, or the run cannot be started.
    """

    def __init__(
        self,
        project: str,
        name: str,
        dir: str | Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ):
        try:
            import wandb
        except ImportError as error:
            raise ReinforceError(
                f"the wandb logger is switched on, and wandb cannot be imported ({error}); "
                "install it with `pip install 'reinforce-rl[wandb]'`, or switch the logger off"
            ) from error
        Path(dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(dir),
                config=dict(config),
                id=run_id,
                resume="allow" if run_id is not None else None,
                mode=mode,
                entity=entity,
                group=group,
                tags=list(tags),
                settings=wandb.Settings(
                    init_timeout=_START_DEADLINE_S,
                    finish_timeout=_FINISH_DEADLINE_S,
                    console="off",  # wandb's capture of stdout and the live progress display tear each other
                    silent=True,
                ),
            )
        except wandb.Error as error:
            raise ReinforceError(
                f"wandb could not start the run {name!r} of project {project!r} in mode {mode!r}: {error}. "
                "Check the API key (`wandb login`) and the network, or use the mode offline"
            ) from error

    @property
    def run_id(self) -> str:
        """wandb's id of the run, to be kept in the checkpoint."""
        return self._run.id

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Log the numbers of `step`; NaN and infinity are left out, as wandb's charts cannot show them."""
        numbers = {prefix + name: plain_number(value) for name, value in metrics.items()}
        self._run.log({name: number for name, number in numbers.items() if number is not None}, step=step)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Log the rows as a wandb table; the first row's keys are its columns. No rows, no table."""
        if not rows:
            return
        import wandb

        columns: list[Any] = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({key: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, step=step)

    def commit(self, step: int) -> None:
        """Nothing: wandb stores a step when the next one comes or the run ends, and adds to it until then."""

    def finalize(self, status: str = SUCCESS) -> None:
        """Write or send what is left and end the run, as failed unless `status` is "success"."""
        self._run.finish(exit_code=0 if status == SUCCESS else 1)
