"""`reinforce-rl replay`: repeat a recorded step, and find its first difference from the record.

The trainer's own functions repeat it. The input of each phase is the record of the phases before,
so that an earlier difference does not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.sampler import shard
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.debugging.differences import (
    BF16,
    COLUMNS,
    EQUAL_BITS,
    ROUNDING,
    Bounds,
    fact_differences,
    missing_samples,
    sample_differences,
    tensor_differences,
    update_differences,
)
from reinforce_rl.debugging.overrides import with_overrides
from reinforce_rl.debugging.replay_results import PhaseResult, Replay
from reinforce_rl.debugging.rescore import Rescorer
from reinforce_rl.debugging.stored import StoredRun, StoredStep
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.megatron.checkpointer import Checkpoint, checkpoint_up_to
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.records import (
    RolloutRow,
    Samples,
    join_samples,
    read_table,
    rollout_files,
    sample_rows,
    samples_table,
    token_columns,
)
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.monitoring.step_record import RankState, StepRecord, read_record, record_files
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.rewards.overrides import reward_overrides
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.episodes import play_episodes, started_environment
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.prompts import build_datasets, build_sampler
from reinforce_rl.rollout.scoring import RolloutScorer
from reinforce_rl.runtime.settings import LENGTH, compare, set_keys, settings_of
from reinforce_rl.runtime.trust import require_trust, untrusted_settings
from reinforce_rl.trainer.run import build_trainer

# A larger machine may have recorded more threads than this one has cores.
_MOST_THREADS = max(4 * (os.cpu_count() or 1), 256)
_STORED = (
    "the recorded scores are used (--reward stored); --reward restart --trust scores again with "
    "the run's source"
)
_OF_EPISODES = (
    "the environment's rewards belong to its episodes, which were not played again; the recorded "
    "scores are used (--phase all --reward restart --trust plays them)"
)
PHASES = ("generate", "score", "logprobs", "advantages", "update")


def replay(
    run: str | Path,
    step: int | None = None,
    *,
    phase: str = "all",
    reward: str | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    start: Callable[[int, int], None] = lambda devices, nodes: None,
    say: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Repeat a recorded training step and compare it phase by phase.

    Args:
        step: None for the last recorded step.
        phase: one of `PHASES`, or all.
        reward: source of the scores: `restart` for the run's own reward source, `stored` for the
            recorded scores, or the address of a server or name of a function. None: `restart` for
            trusted functions, `stored` for others and for servers.
        overrides: KEY=VALUE of `train` on top of the run's settings, such as another layout or the
            model's folder on this machine.
        trust: use functions, addresses and the like that only the folder names; `say` is called
            with each of them first.
        start: called with devices and nodes after the settings were checked.
        say: called on the first rank with a text about the steps that will be repeated, and the
            time that the run took for them.

    Raises:
        ConfigError: an override, or the run's settings on this machine, are wrong.
        DataError: the run has no record of the step. Or the steps since the checkpoint lack tokens
            or had other settings.
    """
    if phase not in (*PHASES, "all"):
        sentence = f"--phase is {phase!r}; expected one of {', '.join(PHASES)}, all"
        raise ConfigError([Fault(sentence, key="replay.phase.unknown")])
    stored = StoredRun(run)
    step = max(record_files(stored.path), default=0) if step is None else step
    recorded = read_record(stored.path, step)
    reward_options = (
        [] if reward in (None, "stored", "restart") else reward_overrides([reward], has_base=True)
    )
    all_overrides = [*reward_options, *overrides]
    cfg, faults = with_overrides(stored.settings(step)[0], all_overrides)
    if faults:
        raise ConfigError(faults)
    if reward is None:
        has_servers = bool(cfg.reward_servers)
        is_trusted = trust or not untrusted_settings(cfg, all_overrides, generation=False)
        reward = "restart" if is_trusted and not has_servers else "stored"
    asks_rewards = reward != "stored"
    require_trust(
        cfg,
        all_overrides,
        stored.path,
        trust=trust,
        rewards=asks_rewards,
        generation=False,
        data=True,
        ranks=True,
        say=say,
    )
    with tempfile.TemporaryDirectory() as scratch:
        isolated = _isolated(cfg, scratch)
        start(isolated.trainer.devices, isolated.trainer.num_nodes)
        checkpoint = checkpoint_up_to(stored.path / "checkpoints", step - 1)
        first = 0 if checkpoint is None else checkpoint.trainer_state["step"]
        steps = {number: stored.step(number) for number in range(first + 1, step + 1)}
        for number, stored_step in steps.items():
            stored_step.needs_tokens("a replay reads them")
            if changed := _matters(stored, number, step):
                raise DataError(
                    f"step {number} was made with other settings than step {step}, and there is no "
                    f"checkpoint between them: {changed}. Expected the same settings since step "
                    f"{first}; replay a step before the change",
                    key="replay.settings.changed_since_checkpoint",
                )
        with configured_mesh(isolated) as mesh, contextlib.ExitStack() as stack:
            if mesh.is_main:
                say(_plan(stored, first, step))
            if mesh.device.type == "cpu" and mesh.world_size == 1:
                torch.set_num_threads(_threads(recorded))  # the order of sums depends on it
            replayer = _Replayer(
                cfg,
                isolated,
                mesh,
                checkpoint,
                stack,
                scores=None if reward == "stored" else reward,
            )
            return replayer.run(stored, recorded, steps, PHASES if phase == "all" else (phase,))


def step_number(text: str | None) -> int | None:
    """Return the step that `--step` names. Raises ConfigError."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        sentence = (
            f"--step is {text!r}; expected a step such as 12, or a range such as 10:20, 10: or :20"
        )
        raise ConfigError([Fault(sentence, key="replay.step.invalid")])
    return int(text)


def _threads(recorded: StepRecord) -> int:
    threads = recorded.machine["threads"]
    if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
        raise DataError(
            f"step {recorded.step}: its record has {str(threads)[:100]} threads; expected 1 to "
            f"{_MOST_THREADS} on this machine. Replay it on a machine with more cores",
            key="replay.threads.out_of_range",
        )
    return threads


def _matters(stored: StoredRun, first: int, second: int) -> str:
    """Return the changes between the settings of two steps that may change an update."""
    cfg = stored.settings(second)[0]
    before, now = (settings_of(stored.path, number)[0] for number in (first, second))
    harmless = re.compile(r"exp_manager\.|trainer\.reinforce\.(val_check|save)_interval$")
    has_schedule = cfg.model.optim.sched.name != "constant"
    return "; ".join(
        f"{key}: {values}"
        for key, values in compare(before, now).items()
        if not harmless.match(key) and (has_schedule or not LENGTH.match(key))
    )


def _plan(stored: StoredRun, first: int, step: int) -> str:
    seconds = sum(
        value for number, value in stored.run.series("timers/train_time") if first < number <= step
    )
    begin = (
        f"the checkpoint of step {first}"
        if first
        else "the initial model, as there is no checkpoint before it"
    )
    updates = "1 update" if step - first == 1 else f"{step - first} updates"
    return (
        f"Step {step} of {stored.path}: {updates} from {begin}; the run took {seconds:.0f} s for "
        "these"
    )


def _isolated(cfg: TrainConfig, scratch: str) -> TrainConfig:
    """Return the settings for ranks that all train and generate; they write into `scratch`."""
    cfg = cfg.colocated()
    cfg.generation = "native"
    cfg.exp_manager.explicit_log_dir = scratch
    cfg.exp_manager.record = "full"
    cfg.trainer.profile.steps = []
    return cfg


class _Replayer:
    """A trainer in the state after the checkpoint's step.

    All ranks make the same calls, and the first rank compares.
    """

    def __init__(
        self,
        asked: TrainConfig,
        cfg: TrainConfig,
        mesh: Mesh,
        checkpoint: Checkpoint | None,
        stack: contextlib.ExitStack,
        *,
        scores: str | None,
    ):
        self._asked = asked
        self._cfg = cfg
        self._mesh = mesh
        self._tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        datasets = build_datasets(
            cfg,
            self._tokenizer,
            splits=["train"],
            loads_environment=scores is not None,
        )
        self._data = datasets.train
        self._start = 0
        if checkpoint is not None:
            state = checkpoint.trainer_state
            self._start = state["step"]
            # The loader is not used. A replay reports each changed prompt; the trainer would refuse
            # to resume.
            data = {
                **build_sampler(cfg, self._data).state_dict(),
                "fingerprint": self._data.fingerprint,
            }
            checkpoint = replace(checkpoint, trainer_state={**state, "data": data})
        self._rescorer = None
        # An environment's rewards are of the episodes that it plays, so no text gives them again.
        self._scores_episodes = asked.takes_environment_rewards
        if scores and not self._scores_episodes:
            self._rescorer = stack.enter_context(contextlib.closing(Rescorer(asked, mesh)))
        monitor = SilentMonitor(cfg.exp_manager.explicit_log_dir, 1)
        self._trainer = build_trainer(
            cfg, mesh, self._tokenizer, datasets, None, monitor, checkpoint
        )
        stack.enter_context(contextlib.closing(self._trainer.model.generator))
        self._plays_episodes = asked.has_environment and scores is not None
        source = None
        if self._plays_episodes:
            environment = stack.enter_context(started_environment(cfg, mesh))
            play_episodes(self._trainer.model, environment, cfg)
            if self._scores_episodes:
                source = connect_to_reward_servers(asked, mesh, self._tokenizer, monitor)
                stack.enter_context(contextlib.closing(source))
        # Log-probs of older weights are not the trainer's own.
        context = replace(self._trainer.rollout_context, staleness=asked.staleness, rm=source)
        self._trainer.rollout_context = context
        self._rollouts = LocalRollouts(context)
        self._scorer = RolloutScorer(context)
        recorder = self._trainer.recorder
        assert recorder is not None
        self._recorder = recorder

    def run(
        self,
        stored: StoredRun,
        recorded: StepRecord,
        steps: dict[int, StoredStep],
        phases: Sequence[str],
    ) -> Replay:
        step = recorded.step
        mesh = self._mesh
        trainer = self._trainer
        earlier = [
            self._again(stored, steps[number], number) for number in range(self._start + 1, step)
        ]
        now = mesh.gather_on_main(RankState(mesh.rank, self._recorder.present(), {}, {}, ""))
        again = replace(
            self._recorder.record_of(step, {}, trainer.train_dataloader.state_dict()),
            settings={
                setting.key: setting.value
                for setting in set_keys(self._asked.model_dump(), TrainConfig)
            },
            scorer=None if self._rescorer is None else self._rescorer.identity,
        )
        same_layout = recorded.layout == again.layout
        bounds = EQUAL_BITS
        if not same_layout or recorded.machine != again.machine or mesh.device.type != "cpu":
            bounds = BF16 if self._cfg.trainer.precision == "bf16" else ROUNDING
        batch, data = self._of_step(steps[step], step)
        results: dict[str, PhaseResult] = {}
        then = read_table(rollout_files(stored.path)[step])

        def compare_samples(
            name: str, batch: RolloutBatch, data: ReinforceBatch | None = None
        ) -> None:
            table = self._table(step, batch, data)
            if table is not None:
                # A record without versions is of the weights of the step before. Responses of older
                # weights are not generated again.
                columns = [column for column in COLUMNS[name] if column != "weight_versions"]
                missing = missing_samples(then, table)
                differences = (
                    [missing] if missing else sample_differences(then, table, columns, bounds)
                )
                results[name] = PhaseResult.of(name, differences)

        if "generate" in phases:
            reason = self._keeps_from_generating(batch, step, same_layout)
            if reason:
                results["generate"] = PhaseResult("generate", "not replayed", note=reason)
            else:
                samples = self._cfg.trainer.reinforce.num_rollouts_per_prompt
                pending = self._rollouts.sample(self._prompts(batch), samples, step)
                compare_samples("generate", pending.batch)
                if "score" in phases and self._scores_episodes:
                    compare_samples("score", self._scorer.score(pending, f"step {step}"))
        if "score" in phases and "score" not in results:
            results["score"] = self._score(steps[step], then, bounds)
        recomputed = replace(batch, log_probs=None, init_log_probs=None)
        if "logprobs" in phases:
            recomputed = self._scorer.with_log_probs(recomputed)
        if "advantages" in phases:
            compare_samples("advantages", batch, data)
        # The update's pass computes the recorded log-probs if no other pass was needed.
        of_update = (
            recomputed.log_probs is None or recomputed.log_probs is recomputed.generator_log_probs
        )
        if "update" in phases or ("logprobs" in phases and of_update):
            self._update(data)
            self._recorder.finish()
            recomputed = (
                replace(recomputed, log_probs=trainer.policy_log_probs) if of_update else recomputed
            )
        if "logprobs" in phases:
            compare_samples("logprobs", recomputed)
        if not mesh.is_main:
            return Replay(stored.run.name, step, self._start, [], [], bounds)
        earlier_results = [
            self._compare_prompts(stored, steps),
            *[result for result in earlier if result.differences][:1],
        ]
        earlier_results.append(self._compare_weights(stored, recorded, now, bounds))
        if "update" in phases:
            made = read_record(self._cfg.exp_manager.explicit_log_dir, step)
            results["update"] = _compare_update(recorded, made, bounds)
        order = [results[name] for name in PHASES if name in results]
        facts = fact_differences(recorded, again)
        return Replay(stored.run.name, step, self._start, [*earlier_results, *order], facts, bounds)

    def _again(self, stored: StoredRun, stored_step: StoredStep, step: int) -> PhaseResult:
        """Repeat the update of an earlier step; compare its advantages."""
        batch, data = self._of_step(stored_step, step)
        table = self._table(step, batch, data)
        self._update(data)
        differences = []
        if table is not None:
            differences = sample_differences(
                read_table(rollout_files(stored.path)[step]), table, COLUMNS["advantages"], ROUNDING
            )
        return PhaseResult.of(f"advantages of step {step}", differences)

    def _of_step(self, stored: StoredStep, step: int) -> tuple[RolloutBatch, ReinforceBatch]:
        """Return this rank's share of a step's rollouts, and the loss's inputs for them."""
        ids = list(dict.fromkeys(stored.batch.group_ids.tolist()))
        mesh = self._mesh
        local_ids = torch.tensor(shard(ids, mesh.dp_rank, mesh.dp_size), dtype=torch.long)
        batch = stored.batch.select(torch.isin(stored.batch.group_ids, local_ids).nonzero()[:, 0])
        if not self._cfg.uses_reference:
            batch = replace(batch, init_log_probs=None)
        self._trainer.step = step - 1
        return batch, self._trainer.generate_reinforce_data(batch)[0]

    def _update(self, data: ReinforceBatch) -> None:
        self._trainer.run_training(data)
        self._trainer.step += 1

    def _prompts(self, batch: RolloutBatch) -> list[Prompt]:
        """Return the prompts of a batch from the current data."""
        ids = dict.fromkeys(batch.group_ids.tolist())
        return [replace(self._data[prompt_id % len(self._data)], id=prompt_id) for prompt_id in ids]

    def _keeps_from_generating(self, batch: RolloutBatch, step: int, same_layout: bool) -> str:
        versions = batch.weight_versions
        mask = batch.response_mask
        generation = self._asked.generation
        old = versions is not None and bool((versions[:, : batch.width][mask] != step - 1).any())
        if self._mesh.sum_over_dp(torch.tensor([int(old)])).item():
            return (
                "its tokens were drawn with weights of earlier steps; the recorded ones are fed in"
            )
        if self._asked.has_environment and not self._plays_episodes:
            return (
                "an environment answered, which is code of the run; the recorded episodes are fed "
                "in (--reward restart --trust plays them again)"
            )
        if generation != "native":
            return f"generation={generation} is not started; the recorded tokens are fed in"
        if not same_layout:
            return (
                "rounding of another layout may choose another token; the recorded ones are fed in"
            )
        return ""

    def _score(self, stored: StoredStep, then: pa.Table, bounds: Bounds) -> PhaseResult:
        if self._rescorer is None:
            note = _OF_EPISODES if self._scores_episodes else _STORED
            return PhaseResult("score", "not replayed", note=note)
        if not self._mesh.is_main:
            return PhaseResult("score", "same")
        prompts = [Prompt(row.prompt_id, row.prompt, ()) for row in stored.rows]
        rows = self._rows(stored.step, prompts, self._rescorer(stored), None)
        table = samples_table(Samples(rows))
        return PhaseResult.of("score", sample_differences(then, table, COLUMNS["score"], bounds))

    def _rows(
        self, step: int, prompts: Sequence[Prompt], batch: RolloutBatch, data: ReinforceBatch | None
    ) -> list[RolloutRow]:
        skips = self._cfg.model.reinforce.skip_special_tokens
        return sample_rows(step, prompts, batch, self._tokenizer, data, skip_special_tokens=skips)

    def _table(
        self, step: int, batch: RolloutBatch, data: ReinforceBatch | None
    ) -> pa.Table | None:
        """Return the samples of all ranks as a record's table; None except on the first rank."""
        cfg = self._cfg.trainer.reinforce
        parts = []
        if self._mesh.is_model_parallel_rank_0:
            rows = self._rows(step, self._prompts(batch), batch, data)
            advantages = data.advantages if data is not None and cfg.has_token_advantages else None
            tokens = token_columns(batch, kl_estimator=cfg.kl_estimator_used, advantages=advantages)
            parts = self._mesh.gather_over_dp_on_first(Samples(rows, tokens))
        return samples_table(join_samples(parts, self._tokenizer)) if self._mesh.is_main else None

    def _compare_prompts(self, stored: StoredRun, steps: dict[int, StoredStep]) -> PhaseResult:
        for step, stored_step in steps.items():
            then = read_table(rollout_files(stored.path)[step])
            now = {p.id: p for p in self._prompts(stored_step.batch)}
            prompts = [now[number] for number in then["prompt_id"].to_pylist()]
            columns = {"prompt_id": then["prompt_id"], "sample_id": then["sample_id"]}
            columns |= {
                "prompt": [p.text for p in prompts],
                "prompt_tokens": [list(p.tokens) for p in prompts],
            }
            columns |= {
                "record": [json.dumps(dict(p.metadata), ensure_ascii=False) for p in prompts]
            }
            if differences := sample_differences(then, pa.table(columns), COLUMNS["prompts"]):
                return PhaseResult.of("prompts", differences, f"in step {step}")
        return PhaseResult.of("prompts", [])

    def _compare_weights(
        self, stored: StoredRun, recorded: StepRecord, now: list[RankState], bounds: Bounds
    ) -> PhaseResult:
        if bounds != EQUAL_BITS:
            why = (
                "checksums are compared bit for bit only; the log-probs show what the weights "
                "compute"
            )
            return PhaseResult("weights", "not replayed", note=why)
        scratch = self._cfg.exp_manager.explicit_log_dir
        known = record_files(stored.path).keys() & record_files(scratch).keys()
        sides = {
            step: (read_record(stored.path, step).ranks, read_record(scratch, step).ranks)
            for step in known
        }
        sides[recorded.step] = recorded.ranks, now
        for step in sorted(step_number for step_number in sides if step_number <= recorded.step):
            if differences := tensor_differences(*sides[step], "before"):
                note = (
                    "as they were read"
                    if step == self._start + 1
                    else f"since the update of step {step - 1}"
                )
                return PhaseResult.of("weights", differences, note)
        return PhaseResult.of("weights", [])


def _compare_update(recorded: StepRecord, made: StepRecord, bounds: Bounds) -> PhaseResult:
    differences = update_differences(recorded, made, bounds)
    if bounds != EQUAL_BITS:
        return PhaseResult.of(
            "update", differences, "numbers only: checksums of the weights are compared bit for bit"
        )
    differences += tensor_differences(recorded.ranks, made.ranks, "optimizer")
    return PhaseResult.of(
        "update", differences + tensor_differences(recorded.ranks, made.ranks, "after")
    )
