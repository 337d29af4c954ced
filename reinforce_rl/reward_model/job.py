"""The job of `examples/train_reward_model.py`: data and a model folder in, a trained reward model and its card out.

output_dir/ of mode=head                of mode=full
  head.safetensors                        model/           the best so far, a ...ForSequenceClassification folder
  README.md    its card                   evaluation.json  its held-out evaluation
                                          checkpoints/     as in the actor's runs
                                          metrics.jsonl  report.html  config.yaml
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.data.tokenizer import load_tokenizer, token_id
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import Checkpointer, latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.model import ModelOptions
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.reward_model.card import (
    CARD_FILE,
    HeadReport,
    PoolingResult,
    full_card,
    sha256_of_file,
    sha256_of_files,
    write_head,
)
from reinforce_rl.reward_model.data import Examples, end_of_turn_id, load_examples, longest_example
from reinforce_rl.reward_model.head import (
    CUT,
    WHOLE,
    CutSequence,
    HeadData,
    cut_sequences,
    features_fingerprint,
    load_features,
    pooled_features,
    save_features,
    synthetic_negatives,
)
from reinforce_rl.reward_model.objectives import Best, Objective, Ranking, Regression, pair_accuracy
from reinforce_rl.reward_model.report import EVALUATION_FILE, RewardModelMonitor, write_report
from reinforce_rl.reward_model.scorer import load_trunk
from reinforce_rl.reward_model.train_full import FullTrainer, TrainableRewardModel, load_trainable
from reinforce_rl.reward_model.train_head import head_accuracy, train_head
from reinforce_rl.runtime.settings import CONFIG_FILE, compare
from reinforce_rl.trainer.build import DTYPES
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LINE_EVERY_SECONDS = 30.0
MODEL_FOLDER = "model"
# With another value of one of these, the steps before and after it belong to different runs.
MEANING = re.compile(r"model\.restore_from_path$|data\.|full\.(objective|attributes|pooling|global_batch_size)$|seed$")


def train_reward_model(
    cfg: TrainRewardModelConfig, *, command: str, console: Console | None = None
) -> HeadReport | FullTrainer[Any]:
    """Run the job of `cfg.mode` on this rank. `command` goes into the card; `console` is for mode=head.

    Raises:
        ReinforceError: the data, the model, a file or a checkpoint cannot be used.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    if cfg.mode == "head":
        return _run_head(cfg, command, console or Console())
    sizes = cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size
    with parallel_mesh(
        *sizes, cfg.model.context_parallel_size, sequence_parallel=cfg.model.sequence_parallel, seed=cfg.seed
    ) as mesh:
        return _run_full(cfg, mesh, command)


# A head on a frozen trunk


def _run_head(cfg: TrainRewardModelConfig, command: str, console: Console) -> HeadReport:
    start, trunk_folder = time.monotonic(), Path(cfg.model.restore_from_path)
    tokenizer = load_tokenizer(trunk_folder)
    data = load_examples(cfg, tokenizer)
    train, held_out = data.train_rows, data.held_out_rows
    console.print(
        f"{data.num_lines} pairs read, {len(data.used)} used: {len(train)} to train on, {len(held_out)} held out"
    )
    for line in data.skipped_lines:
        console.print(line, style="bold yellow" if line.startswith("W") else None, soft_wrap=True)

    trunk_sha256 = sha256_of_files([*trunk_folder.glob("*.safetensors"), trunk_folder / "config.json"])
    made = synthetic_negatives(
        data.used,
        cfg.degenerate.fraction,
        end_id=end_of_turn_id(tokenizer),
        min_tokens=cfg.cuts.min_tokens,
        max_tokens=cfg.cuts.max_tokens,
        seed=cfg.seed,
    )
    sequences = cut_sequences(data.used, cfg.cuts, cfg.seed)
    for item in made:
        tokens = (data.used[item.pair].prompt + item.tokens)[: longest_example(cfg)]
        sequences.append(CutSequence(tokens, (len(tokens),)))
    features = _features(cfg, sequences, trunk_sha256, console)

    keys = [pair.prompt_key for pair in data.used]
    results = {}
    for pooling in cfg.head.poolings:
        views = HeadData(features[pooling], keys, made)
        trained = train_head(
            views.pairs(train, views.trained_views),
            pooling,
            l2_grid=cfg.head.l2,
            folds=cfg.head.folds,
            seed=cfg.seed + 1,
            extra=views.against_made(train),
            cross_validate_always=len(cfg.head.poolings) > 1,
        )
        synthetic = views.against_made(held_out)
        results[pooling] = PoolingResult(
            trained,
            train_whole=head_accuracy(trained.head, views.pairs(train, [WHOLE])),
            held_out_whole=head_accuracy(trained.head, views.pairs(held_out, [WHOLE])),
            held_out_cut=head_accuracy(trained.head, views.pairs(held_out, [CUT])),
            held_out_synthetic=None if synthetic is None else head_accuracy(trained.head, synthetic),
        )
    lengths = torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in data.held_out])
    report = HeadReport(
        cfg,
        trunk_sha256,
        sha256_of_file(cfg.data.pairs_path or ""),
        data.skipped,
        train_pairs=len(train),
        train_prompts=len({keys[i] for i in train}),
        held_out_pairs=len(held_out),
        held_out_prompts=len({keys[i] for i in held_out}),
        baseline_whole=pair_accuracy(*lengths.t()),
        baseline_cut=pair_accuracy(*lengths.clamp(max=cfg.cuts.evaluate_at).t()),
        results=results,
        # Cross-validation only: held-out pairs must not select the pooling.
        pooling=min(results, key=lambda pooling: results[pooling].trained.chosen_validation.loss),
        command=command,
        seconds=time.monotonic() - start,
    )
    path = write_head(report, cfg.output_dir)
    _print_table(report, console)
    console.print(f"written: {path} and README.md beside it", soft_wrap=True)
    return report


def _features(
    cfg: TrainRewardModelConfig, sequences: list[CutSequence], trunk_sha256: str, console: Console
) -> dict[str, Tensor]:
    fingerprint = features_fingerprint(trunk_sha256, sequences, cfg.head.poolings)
    if cfg.features_cache is not None:
        cached = load_features(cfg.features_cache, fingerprint)
        if cached is not None:
            console.print(f"features from {cfg.features_cache}", soft_wrap=True)
            return cached
    with parallel_mesh(seed=cfg.seed) as mesh:
        trunk = load_trunk(cfg.model.restore_from_path, mesh).eval()
        with _progress(console, "features", sum(len(s.tokens) for s in sequences)) as advance:
            features = pooled_features(
                trunk,
                sequences,
                cfg.head.poolings,
                micro_batch_size=cfg.micro_batch_size,
                device=mesh.device,
                on_progress=advance,
            )
    if cfg.features_cache is not None:
        save_features(cfg.features_cache, features, fingerprint)
    return features


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, else print a line every `LINE_EVERY_SECONDS`."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=console) as bar:
            task = bar.add_task(name, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    start = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= LINE_EVERY_SECONDS:
            last = now
            left = (now - start) / done * (total - done)
            console.print(f"{name}: {done / total:.0%}, about {left:.0f} s left")

    yield advance


def _print_table(report: HeadReport, console: Console) -> None:
    table = Table(
        title=f"Share of {report.held_out_pairs} held-out pairs ordered rightly, ± standard error", box=SIMPLE
    )
    titles, *rows = report.table()
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


# All weights


def _run_full(cfg: TrainRewardModelConfig, mesh: Mesh, command: str) -> FullTrainer[Any]:
    folder = Path(cfg.output_dir)
    tokenizer = load_tokenizer(cfg.model.restore_from_path)
    data = load_examples(cfg, tokenizer)
    sampler = PromptSampler(
        len(data.train_rows), cfg.full.global_batch_size, seed=cfg.seed, max_epochs=cfg.full.max_epochs
    )
    steps = cfg.full.max_epochs * sampler.steps_per_epoch
    steps = steps if cfg.full.max_steps == -1 else min(steps, cfg.full.max_steps)
    checkpoint = latest_checkpoint(folder / "checkpoints") if cfg.full.resume_if_exists else None
    settings = OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump()))
    if checkpoint is not None:
        refuse_changes(folder, settings)
    if mesh.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG_FILE, settings)
    start_step = checkpoint.trainer_state["step"] if checkpoint else 0
    monitor = RewardModelMonitor(
        folder, steps, start_step, enabled=mesh.is_main, regression=cfg.full.objective == "regression"
    )
    with monitor.running():
        _describe_run(monitor, mesh, cfg, data, tokenizer)
        trainer = _build_trainer(cfg, mesh, tokenizer, data, sampler, monitor, steps, command)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            monitor.note(f"Going on from {checkpoint.folder}, after step {start_step} of {steps}.")
        trainer.fit()
        if trainer.stopped_early and trainer.best is not None:
            monitor.note(
                f"Ended after step {trainer.step} of {steps}: the held-out loss has not fallen since step "
                f"{trainer.best.step}."
            )
        if mesh.is_main:
            monitor.note(f"Report: {write_report(folder)}")
            monitor.note(f"Model: {folder / MODEL_FOLDER}")
    return trainer


def refuse_changes(folder: Path, settings: str) -> None:
    """Raise ConfigError if the run to resume had other values of the keys in `MEANING`."""
    file = folder / CONFIG_FILE
    changes = compare(file.read_text("utf-8"), settings, TrainRewardModelConfig) if file.is_file() else {}
    refused = "; ".join(f"{key}: {values}" for key, values in changes.items() if MEANING.match(key))
    if refused:
        raise ConfigError(
            [
                f"{folder} has checkpoints of a run with other settings: {refused}. Set them back to go on, or choose "
                "another output_dir"
            ]
        )


def _describe_run(
    monitor: RewardModelMonitor,
    mesh: Mesh,
    cfg: TrainRewardModelConfig,
    data: Examples[Any],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    if mesh.world_size > 1:
        monitor.note(mesh.grid())
    monitor.note(f"{len(data.train_rows)} examples to train on, {len(data.held_out_rows)} held out")
    for line in data.skipped_lines:
        monitor.note(line)
    pad_id = token_id(tokenizer.pad_token_id)
    if cfg.full.pooling == "last" and pad_id is not None and pad_id == token_id(tokenizer.eos_token_id):
        monitor.note(
            "The tokenizer's padding token is its end-of-sequence token. transformers takes the last token that is no "
            "padding, so the score is read from the token before the end; full.pooling=mean reads all of them."
        )


def _build_trainer(
    cfg: TrainRewardModelConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    data: Examples[Any],
    sampler: PromptSampler,
    monitor: RewardModelMonitor,
    steps: int,
    command: str,
) -> FullTrainer[Any]:
    source, folder, optim = cfg.model.restore_from_path, Path(cfg.output_dir), cfg.model.optim
    vocab_size = Architecture.from_folder(source).vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            [f"the tokenizer of {source} has {len(tokenizer)} tokens, its model only {vocab_size} embeddings"]
        )
    monitor.phase("loading the model")
    objective: Objective[Any] = Ranking() if cfg.full.objective == "ranking" else Regression(cfg.full.attributes)
    options = ModelOptions(
        recompute_granularity=cfg.model.activations_checkpoint_granularity,
        recompute_method=cfg.model.activations_checkpoint_method,
        recompute_num_layers=cfg.model.activations_checkpoint_num_layers,
        overrides=cfg.model.megatron_overrides,
    )
    dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
    lm = load_trainable(source, mesh, objective.names, seed=cfg.seed, dtype=dtype, options=options)
    pad_id = token_id(tokenizer.pad_token_id)
    model = TrainableRewardModel(
        lm,
        pooling=cfg.full.pooling,
        pad_id=pad_id,
        micro_batch_size=cfg.micro_batch_size,
        optim=optim,
    )
    optimizer, scheduler = build_optimizer(model.ddp, optim, clip_grad=cfg.full.gradient_clip_val, total_steps=steps)
    sizes = len(data.train_rows), len(data.held_out_rows)

    def export(best: Best) -> None:
        model.export(source, folder / MODEL_FOLDER, objective.names, pad_id)
        if mesh.is_main:
            card = full_card(cfg, best, objective.names, sizes, command)
            write_atomically(folder / MODEL_FOLDER / CARD_FILE, card)
            write_atomically(folder / EVALUATION_FILE, json.dumps(dataclasses.asdict(best), indent=2))

    return FullTrainer(
        model,
        ActorOptimizer(optimizer, scheduler),
        objective,
        data.train,
        data.held_out,
        sampler,
        Checkpointer(folder / "checkpoints", mesh, model.ddp, optimizer, scheduler, keep_last=cfg.full.keep_last),
        monitor,
        export,
        steps,
        cfg.full,
    )
