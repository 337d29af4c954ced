"""`reinforce-rl verify`: one training step of a configuration in other ways that must not change it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.data.prompts import PromptLoader, RLHFDatasets
from reinforce_rl.debugging.gradient import on_one_rank
from reinforce_rl.debugging.verify_runs import label, layouts, resume, value_of, with_values
from reinforce_rl.debugging.verify_step import (
    DRAWN,
    LOG_PROBS,
    OF_GENERATION,
    OF_UPDATE,
    PHASES,
    WEIGHTS,
    Check,
    Measured,
    Step,
    checks,
    rollout_maker,
)
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.preflight.plan import read_inputs
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.build import actor_settings, build_actor, build_generator, build_sampler
from reinforce_rl.trainer.state import PastSteps

MAX_SAMPLES = 4  # of a prompt
SHARED, PADDED = "model.shared_prefix", "trainer.reinforce.rollout_batch_seq_length"


@dataclass
class Verification:
    head: str
    checks: list[Check] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return all(one.verdict in ("ok", "not tried") for one in self.checks)

    def table(self) -> RenderableType:
        """Return a table for each setting, with a row for each phase, and the verdict."""
        parts: list[RenderableType] = [Text(self.head)]
        for setting, rows in itertools.groupby(self.checks, lambda one: one.setting):
            columns = Column("compared", min_width=28), _right("difference"), _right("bound"), "verdict"
            table = Table(*columns, box=None, padding=(0, 2, 0, 4), show_header=len(parts) == 1, header_style="bold")
            for one in rows:
                numbers = f"{one.difference:.1e}", f"{one.bound:.2g}"
                table.add_row(one.compared, *(numbers if one.has_numbers else "--"), one.verdict)
            parts += [Text(setting), table]
        return Group(*parts, "", *map(Text, self.verdict()))

    def verdict(self) -> list[str]:
        """Return why settings were not tried, the first phase in which each other differs, and a sentence of all."""
        said = [f"not tried: {one.setting}: {one.detail}" for one in self.checks if one.verdict == "not tried"]
        tried = [one for one in self.checks if one.verdict != "not tried"]
        first = {one.setting: one for one in reversed(tried) if one.verdict != "ok"}
        for one in reversed(first.values()):
            if one.failed:
                said.append(f"{one.setting} cannot be computed: {one.detail}")
            else:
                how = f"by {one.difference:.1e}, above the bound {one.bound:.2g}: {one.detail}"
                said.append(f"{one.setting} changes the {one.compared} {how}")
        count = len({one.setting for one in tried})
        same = f"The step is the same in all {count} ways that were tried"
        return [*said, f"The step DIFFERS in {len(first)} of {count} ways that were tried" if first else same]


def _right(name: str) -> Column:
    return Column(name, justify="right", min_width=10)


def verify(
    cfg: TrainConfig,
    *,
    ranks: int = 1,
    resumes: bool = True,
    prompts: int = 3,
    max_length: int = 24,
    say: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Compute one training step in other ways, and compare it with the step as configured, on one rank.

    Args:
        cfg: checked settings of `train`; nothing is written to its run's folder.
        ranks: number of ranks whose layouts are checked too; 1 for none.
        resumes: also kill a run and resume it.
        prompts, max_length: bounds on the step's prompts and response tokens.
        say: called with each way that is about to be tried.

    Raises ReinforceError: the step as configured cannot be computed.
    """
    engine = cfg.generation if cfg.generation in ENGINES else None
    with tempfile.TemporaryDirectory(prefix="verify-") as place:
        folder = Path(place)
        cfg = _small(cfg, folder / "run", max(prompts, ranks), max_length)
        found = Verification(
            f"{cfg.model.reinforce.num_rollout_samples} prompts x {cfg.trainer.reinforce.num_rollouts_per_prompt} "
            f"samples of at most {cfg.model.reinforce.length_params.max_length} tokens, precision "
            f"{cfg.trainer.precision}"
        )
        say(found.head)
        with parallel_mesh(seed=cfg.model.seed, timeout_seconds=cfg.torch_timeout_seconds) as mesh:
            step, base = _on_this_rank(cfg, mesh, found, say)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if engine is not None:
            advice = "the native engine generates here; `reinforce-rl check-generation` compares the two"
            found.checks.append(Check(f"generation={engine}", "samples", detail=advice))
        if ranks > 1:
            say(f"layouts of {ranks} ranks")
            for one in layouts(cfg, step, base, ranks, folder):
                found.checks += one
        if resumes:
            say("a run that is killed and resumed")
            found.checks += resume(cfg, folder)
    return found


def _small(cfg: TrainConfig, folder: Path, prompts: int, max_length: int) -> TrainConfig:
    """Return the settings of two short steps on one rank, which write to `folder`."""
    own = cfg.generation
    cfg = on_one_rank(cfg, cfg.trainer.precision)
    cfg.generation = "native" if own in ENGINES else own
    rl, rollout, exp, data = cfg.trainer.reinforce, cfg.model.reinforce, cfg.exp_manager, cfg.model.data.data_prefix
    lengths, saving = rollout.length_params, exp.checkpoint_callback_params
    lengths.max_length = min(lengths.max_length, max_length)
    lengths.min_length = min(lengths.min_length, lengths.max_length)
    rl.overlong_buffer = min(rl.overlong_buffer, lengths.max_length)
    if rl.truncated_samples in ("drop", "mask"):  # few responses end so early
        rl.truncated_samples = "keep"
    several = cfg.prompts_per_update is not None
    rollout.num_rollout_samples = min(rollout.num_rollout_samples, prompts)
    rl.num_rollouts_per_prompt = min(rl.num_rollouts_per_prompt, MAX_SAMPLES)
    cfg.model.global_batch_size = rl.num_rollouts_per_prompt if several else None
    rl.max_steps, rl.max_epochs, rl.save_interval, rl.val_check_interval = 2, 2, 1, 0
    data.validation = data.test = None
    exp.explicit_log_dir, exp.loggers, exp.max_time_per_run = str(folder), [], None
    exp.create_tensorboard_logger = exp.create_wandb_logger = False
    saving.keep_best, saving.keep_last, saving.async_save, saving.save_hf_on_train_end = 0, 1, False, False
    cfg.trainer.profile.steps = []
    return cfg


def _on_this_rank(
    cfg: TrainConfig, mesh: Mesh, found: Verification, say: Callable[[str], None]
) -> tuple[Step, Measured]:
    """Make the step, and try what needs one rank; return the step and what was measured of it as configured."""
    tokenizer, datasets = read_inputs(cfg).checked()
    monitor = SilentMonitor(".", notes=True)
    with contextlib.closing(connect_to_reward_servers(cfg, mesh, tokenizer, monitor)) as rm:
        actor = build_actor(cfg, mesh, tokenizer)
        generator = actor.generator
        with contextlib.closing(generator):
            say("the step as configured")
            step = _made(cfg, actor, rm, datasets, found)
            base = step.measure(cfg, actor, PHASES[:-1])
            if generator.is_exact and base[DRAWN]:
                found.checks += checks("generator and trainer", base, {LOG_PROBS: base[DRAWN]}, cfg)
            for values, phases in _variations(cfg, step, actor):
                values = {key: value for key, value in values.items() if value_of(cfg, key) != value}
                if not values:
                    continue
                own = with_values(cfg, values)
                say(label(values))
                actor.settings = actor_settings(own, actor.lm, tokenizer)
                is_other = phases == OF_GENERATION
                actor.generator = build_generator(own, actor.lm, tokenizer) if is_other else generator
                with contextlib.closing(actor.generator) if is_other else contextlib.nullcontext():
                    measured = step.measure(own, actor, phases)
                found.checks += checks(label(values), base, measured, cfg)
            actor.settings, actor.generator = actor_settings(cfg, actor.lm, tokenizer), generator
            again = step.measure(cfg, actor, (*OF_UPDATE, WEIGHTS))
            base[WEIGHTS] = again[WEIGHTS]
            found.checks += checks("the same once more", base, {phase: again[phase] for phase in OF_UPDATE}, cfg)
    del actor, generator
    gc.collect()  # megatron's models hold themselves
    for values in _other_models(cfg, mesh):
        own = with_values(cfg, values)
        say(label(values))
        actor = build_actor(own, mesh, tokenizer, with_reference=False)
        with contextlib.closing(actor.generator):
            found.checks += checks(label(values), base, step.measure(own, actor, (*OF_UPDATE, WEIGHTS)), cfg)
        del actor
        gc.collect()
    return step, base


def _made(
    cfg: TrainConfig,
    actor: MegatronGPTReinforceActorModel,
    rm: RewardSource,
    datasets: RLHFDatasets,
    found: Verification,
) -> Step:
    """Make and score rollouts, and compute their advantages, as the first step of a run does."""
    cfg = with_values(cfg, {"trainer.reinforce.dynamic_filtering": False})
    rl, loader = cfg.trainer.reinforce, PromptLoader(datasets.train, build_sampler(cfg, datasets.train), 0, 1)
    made = rollout_maker(cfg, actor, rm, loader).make(1)
    max_length = actor.settings.sampling.max_length
    data = reinforce_batch(made.batch, rl, PastSteps(rl), step=1, max_length=max_length)
    if not data.advantages[data.trains].any():
        found.head += "; all rewards of a prompt are equal, so the advantages are random numbers"
        trains = made.batch.response_lengths > 0
        drawn = torch.randn(trains.shape, generator=torch.Generator().manual_seed(0))
        data = replace(data, trains=trains, advantages=drawn[:, None] * (made.batch.response_mask & trains[:, None]))
    return Step(made.prompts, data)


def _variations(
    cfg: TrainConfig, step: Step, actor: MegatronGPTReinforceActorModel
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield the settings to try on the same model, and the phases that they concern."""
    model, rollout, batch = "model.", "model.reinforce.", step.data.rollouts
    longest, count = int((batch.prompt_lengths + batch.response_lengths).max()), len(batch.rewards)
    padded = min(longest + 9, cfg.model.encoder_seq_length)
    by_size = {f"{model}tokens_per_micro_batch": None} if cfg.model.tokens_per_micro_batch else {}
    for size in (1, 3, count):
        yield by_size | {f"{model}micro_batch_size": size}, OF_UPDATE
    for size in (1, count):
        yield by_size | {f"{rollout}forward_micro_batch_size": size}, (LOG_PROBS,)
    if actor.settings.shared_prefix:
        yield {SHARED: False}, (LOG_PROBS, *OF_UPDATE)
        yield {SHARED: False, PADDED: padded}, (LOG_PROBS, *OF_UPDATE)
    else:
        yield {PADDED: None if cfg.trainer.reinforce.rollout_batch_seq_length else padded}, (LOG_PROBS, *OF_UPDATE)
        yield {SHARED: True, PADDED: None}, (LOG_PROBS, *OF_UPDATE)
    for share in (True, False):
        packed = {f"{model}tokens_per_micro_batch": 2 * longest, SHARED: share, PADDED: None}
        yield packed, (LOG_PROBS, *OF_UPDATE)
    yield {f"{model}logits_chunk_tokens": 5}, (LOG_PROBS, *OF_UPDATE)
    for size in dict.fromkeys((1, 2, len(step.prompts))):
        yield {f"{rollout}rollout_micro_batch_size": size}, OF_GENERATION
    if cfg.generation == "native":
        yield {f"{rollout}lean_decoding": not cfg.model.reinforce.lean_decoding}, OF_GENERATION
        yield {f"{rollout}generation_cache_tokens": cfg.model.encoder_seq_length}, OF_GENERATION
        if actor.lm.mesh.device.type == "cuda":
            yield {f"{rollout}cuda_graphs": False}, OF_GENERATION
            yield {f"{rollout}cuda_graphs": False, f"{rollout}static_decoding": False}, OF_GENERATION


def _other_models(cfg: TrainConfig, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield the settings to try that need a model of their own."""
    key, is_full = "model.activations_checkpoint_", cfg.model.activations_checkpoint_granularity == "full"
    values = (None, None, None) if is_full else ("full", "uniform", 1)
    yield {f"{key}granularity": values[0], f"{key}method": values[1], f"{key}num_layers": values[2]}
    if mesh.device.type == "cpu" and cfg.trainer.precision == "32":
        yield {"model.optim.in_place_gradients": not cfg.model.optim.in_place_gradients}
