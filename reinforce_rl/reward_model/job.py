"""The job of `reinforce-rl train-rm`: data and a model folder in, a trained reward model out.

output_dir/ of mode=head     of mode=full
  head.safetensors             model/           the best ...ForSequenceClassification folder so far
  head_evaluation.json         evaluation.json  its held-out evaluation
                               checkpoints/     as in the actor's runs
                               metrics.jsonl  report.html  config.yaml
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import reinforce_rl
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.data.readers import files_of
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.data.tokenizer import load_tokenizer, token_id
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import Checkpointer, latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.monitoring.report import EVALUATION_FILE
from reinforce_rl.policy.build import DTYPES, check_vocabulary, model_options
from reinforce_rl.reward_model import head as heads
from reinforce_rl.reward_model.data import (
    EncodedPair,
    Examples,
    end_of_turn_ids,
    load_examples,
    longest_example,
)
from reinforce_rl.reward_model.head import CUT, WHOLE
from reinforce_rl.reward_model.objectives import (
    Accuracy,
    Best,
    Objective,
    Ranking,
    Regression,
    pair_accuracy,
)
from reinforce_rl.reward_model.scorer import load_trunk
from reinforce_rl.reward_model.train_full import (
    FullTrainer,
    RewardModelMonitor,
    TrainableRewardModel,
    load_trainable,
)
from reinforce_rl.runtime.settings import CONFIG_FILE, compare, read_tree
from reinforce_rl.runtime.stored_config import config_text, read_stored
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import make_readable, write_atomically

LINE_EVERY_SECONDS = 30.0
HEAD_FILE = "head.safetensors"
HEAD_EVALUATION_FILE = "head_evaluation.json"
MODEL_FOLDER = "model"
# A resumed run must keep the values of these keys.
MEANING = re.compile(
    r"model\.restore_from_path$|data\.|full\.(objective|attributes|pooling|global_batch_size)$"
    r"|seed$"
)


def train_reward_model(cfg: TrainRewardModelConfig) -> heads.TrainedHead | FullTrainer:
    """Run the job of `cfg.mode` on this rank.

    Raises:
        ReinforceError: the data, the model, a file or a checkpoint cannot be used.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    recorded = Path(cfg.output_dir) / CONFIG_FILE
    is_resumed = cfg.mode == "full" and cfg.full.resume_if_exists and recorded.is_file()
    tree = read_tree(read_stored(recorded)) if is_resumed else {}
    cfg.data.freeze_date(
        cfg.model.restore_from_path, tree.get("data", {}).get("chat_template_date")
    )
    if cfg.mode == "head":
        return _run_head(cfg, Console())
    model = cfg.model
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    with parallel_mesh(*sizes, sequence_parallel=model.sequence_parallel, seed=cfg.seed) as mesh:
        return _run_full(cfg, mesh)


# A head on a frozen trunk


def _run_head(cfg: TrainRewardModelConfig, console: Console) -> heads.TrainedHead:
    folder = Path(cfg.model.restore_from_path)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, Architecture.from_folder(folder), folder)
    data = load_examples(cfg, tokenizer)
    console.print(
        f"{data.num_lines} pairs read, {len(data.used)} used: {len(data.train_rows)} to train on, "
        f"{len(data.held_out_rows)} held out"
    )
    for line in data.skipped_lines:
        style = "bold yellow" if line.startswith("W") else None
        console.print(line, style=style, soft_wrap=True)

    trunk_sha256 = heads.sha256_of_trunk(folder)
    end = end_of_turn_ids(ChatRenderer(tokenizer, cfg.data.template_options("data.")))
    fraction = cfg.degenerate.fraction
    negatives = heads.synthetic_negatives(data.used, fraction, cfg.prefixes, end=end, seed=cfg.seed)
    sequences = heads.cut_sequences(data.used, cfg.prefixes, cfg.seed)
    for negative in negatives:
        tokens = (data.used[negative.pair].prompt + negative.tokens)[: longest_example(cfg)]
        sequences.append(heads.CutSequence(tokens, (len(tokens),)))
    features = heads.HeadData(
        _features(cfg, sequences, trunk_sha256, console), len(data.used), negatives
    )

    trained = heads.train_head(
        features.pairs(data.train_rows, features.trained_views),
        cfg.head.pooling,
        cfg.head.l2,
        extra=features.against_negatives(data.train_rows),
    )
    accuracies = _accuracies(cfg, data, features, trained)
    about = {
        "trunk": folder.resolve().name,
        "trunk_sha256": trunk_sha256,
        "data_file": Path(cfg.data.pairs_path or "").name,
        "data_sha256": _sha256_of_data(cfg, data),
        "train_pairs": str(len(data.train_rows)),
        "held_out_pairs": str(len(data.held_out_rows)),
        "l2": f"{cfg.head.l2:g}",
        "raw_mean": f"{trained.raw_mean:.6g}",
        "raw_std": f"{trained.raw_std:.6g}",
        "package_version": reinforce_rl.__version__,
    }
    path = Path(cfg.output_dir) / HEAD_FILE
    with heads.replaced(path) as part:
        trained.head.save(part, about)
        make_readable(part)  # safetensors' files are readable by their owner only
        evaluation = {name: dataclasses.asdict(accuracy) for name, accuracy in accuracies.items()}
        text = json.dumps(evaluation, indent=2) + "\n"
        write_atomically(path.with_name(HEAD_EVALUATION_FILE), text)
    table = Table(title="Pair accuracy, ± standard error", box=SIMPLE)
    table.add_column("")
    table.add_column("", justify="right")
    for name, accuracy in accuracies.items():
        table.add_row(name.replace("_", " "), str(accuracy))
    console.print(table)
    console.print(f"written: {path} and {HEAD_EVALUATION_FILE} beside it", soft_wrap=True)
    return trained


def _accuracies(
    cfg: TrainRewardModelConfig,
    data: Examples[EncodedPair],
    features: heads.HeadData,
    trained: heads.TrainedHead,
) -> dict[str, Accuracy]:
    """Return the head's accuracies, and the accuracies of choosing the longer answer."""
    cut = cfg.prefixes.evaluate_at
    lengths = torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in data.held_out])
    cut_lengths = lengths.clamp(max=cut)
    parts = {
        "train": features.pairs(data.train_rows, [WHOLE]),
        "held_out": features.pairs(data.held_out_rows, [WHOLE]),
        f"held_out_cut_to_{cut}": features.pairs(data.held_out_rows, [CUT]),
    }
    against_negatives = features.against_negatives(data.held_out_rows)
    if against_negatives is not None:
        parts["held_out_above_made"] = against_negatives
    accuracies = {name: heads.head_accuracy(trained.head, part) for name, part in parts.items()}
    accuracies["longer_wins"] = pair_accuracy(lengths[:, 0], lengths[:, 1])
    accuracies[f"longer_wins_cut_to_{cut}"] = pair_accuracy(cut_lengths[:, 0], cut_lengths[:, 1])
    return accuracies


def _features(
    cfg: TrainRewardModelConfig,
    sequences: list[heads.CutSequence],
    trunk_sha256: str,
    console: Console,
) -> Tensor:
    pooling = cfg.head.pooling
    fingerprint = heads.features_fingerprint(trunk_sha256, sequences, pooling)
    if cfg.features_cache is not None:
        cached = heads.load_features(cfg.features_cache, fingerprint)
        if cached is not None:
            console.print(f"features from {cfg.features_cache}", soft_wrap=True)
            return cached
    num_tokens = sum(len(sequence.tokens) for sequence in sequences)
    with parallel_mesh(seed=cfg.seed) as mesh:
        trunk = load_trunk(cfg.model.restore_from_path, mesh).eval()
        with _progress(console, "features", num_tokens) as advance:
            features = heads.pooled_features(
                trunk,
                sequences,
                pooling,
                cfg.micro_batch_size,
                device=mesh.device,
                on_progress=advance,
            )
    if cfg.features_cache is not None:
        heads.save_features(cfg.features_cache, features, fingerprint)
    return features


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal; otherwise print a line every `LINE_EVERY_SECONDS`."""
    columns = (
        *Progress.get_default_columns()[:3],
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        number = bar.add_task(name, total=total)
        task = bar.tasks[0]
        start = time.monotonic()
        last = start

        def advance(amount: int) -> None:
            nonlocal last
            bar.advance(number, amount)
            now = time.monotonic()
            if not console.is_terminal and now - last >= LINE_EVERY_SECONDS:
                last = now
                left = (now - start) / task.completed * (total - task.completed)
                console.print(f"{name}: {task.percentage:.0f}%, about {left:.0f} s left")

        yield advance


# All weights


def _run_full(cfg: TrainRewardModelConfig, mesh: Mesh) -> FullTrainer:
    folder = Path(cfg.output_dir)
    source = cfg.model.restore_from_path
    full = cfg.full
    optim = cfg.model.optim
    checkpoints = folder / "checkpoints"
    tokenizer = load_tokenizer(source)
    data = load_examples(cfg, tokenizer)
    sampler = PromptSampler(
        len(data.train_rows), full.global_batch_size, seed=cfg.seed, max_epochs=full.max_epochs
    )
    steps = full.max_epochs * sampler.steps_per_epoch
    steps = steps if full.max_steps == -1 else min(steps, full.max_steps)
    checkpoint = latest_checkpoint(checkpoints) if full.resume_if_exists else None
    settings = config_text(cfg.model_dump())
    if checkpoint is not None:
        _refuse_changes(folder, settings)
    if mesh.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG_FILE, settings)
    start_step = checkpoint.trainer_state["step"] if checkpoint else 0
    objective: Objective = Ranking() if full.objective == "ranking" else Regression(full.attributes)
    monitor = RewardModelMonitor(folder, steps, start_step, objective, enabled=mesh.is_main)
    with monitor.running():
        if mesh.world_size > 1:
            monitor.note(mesh.layout.grid())
        sizes = f"{len(data.train_rows)} examples to train on, {len(data.held_out_rows)} held out"
        for line in (sizes, *data.skipped_lines):
            monitor.note(line)
        pad_id = token_id(tokenizer.pad_token_id)
        if (
            full.pooling == "last"
            and pad_id is not None
            and pad_id == token_id(tokenizer.eos_token_id)
        ):
            monitor.note(
                "The tokenizer's padding token is its end-of-sequence token. transformers takes "
                "the last token that is not padding, so the score is read from the token before "
                "the end; full.pooling=mean reads all."
            )
        check_vocabulary(tokenizer, Architecture.from_folder(source), source)
        monitor.phase("loading the model")
        dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
        options = model_options(cfg.model)
        lm = load_trainable(
            source, mesh, objective.names, seed=cfg.seed, dtype=dtype, options=options
        )
        model = TrainableRewardModel(lm, full.pooling, pad_id, cfg.micro_batch_size, optim)
        adam, scheduler = build_optimizer(
            model.ddp, optim, clip_grad=full.gradient_clip_val, total_steps=steps
        )
        checkpointer = Checkpointer(
            checkpoints, mesh, model.ddp, adam, scheduler, keep_last=full.keep_last
        )

        def export(best: Best) -> None:
            model.export(source, folder / MODEL_FOLDER, objective.names, pad_id)
            if mesh.is_main:
                write_atomically(
                    folder / EVALUATION_FILE, json.dumps(dataclasses.asdict(best), indent=2)
                )

        optimizer = ActorOptimizer(adam, scheduler)
        trainer = FullTrainer(
            model, optimizer, objective, data, sampler, checkpointer, monitor, export, steps, full
        )
        if checkpoint is not None:
            trainer.restore(checkpoint)
            monitor.note(f"Resuming from {checkpoint.folder}, after step {start_step} of {steps}.")
        trainer.fit()
        if trainer.stopped_early and trainer.best is not None:
            since = trainer.best.step
            monitor.note(
                f"Ended after step {trainer.step} of {steps}: no lower held-out loss since step "
                f"{since}."
            )
        if mesh.is_main:
            monitor.note(f"Report: {monitor.report()}")
            monitor.note(f"Model: {folder / MODEL_FOLDER}")
            if trainer.best is not None:
                options = _serve_options(folder / MODEL_FOLDER, trainer.best, objective.names)
                monitor.note(f"Serve it: reinforce-rl serve {options}")
    return trainer


def _serve_options(model: Path, best: Best, names: Sequence[str]) -> str:
    """Return the arguments of `reinforce-rl serve` for this model.

    `names` is empty for a single score.
    """
    path = f"reward_model.restore_from_path={shlex.quote(str(model))}"
    if names:
        weights = ", ".join(f"{name}: 1.0" for name in names)
        return f"{path} 'reward_model.attribute_weights={{{weights}}}'"
    mean = best.evaluation.metrics["score_mean"]
    std = best.evaluation.metrics["score_std"]
    return f"{path} reward_model.mean={mean:.4f} reward_model.std={std:.4f}"


def _refuse_changes(folder: Path, settings: str) -> None:
    """Raise ConfigError if the run to resume has other values of the keys in `MEANING`."""
    file = folder / CONFIG_FILE
    changes = compare(read_stored(file), settings, TrainRewardModelConfig) if file.is_file() else {}
    refused = "; ".join(f"{key}: {values}" for key, values in changes.items() if MEANING.match(key))
    if refused:
        raise ConfigError(
            [
                Fault(
                    f"{folder} has checkpoints of a run with other settings: {refused}. Restore "
                    "them to continue, or choose another output_dir",
                    key="reward_model.resume.other_settings",
                )
            ]
        )


def _sha256_of_data(cfg: TrainRewardModelConfig, data: Examples[EncodedPair]) -> str:
    """Return the hash of the file of pairs; of the tokenised pairs if there are several files."""
    files = files_of(cfg.data.pairs_path or "")
    if len(files) == 1 and files[0].is_file():
        return heads.sha256_of_file(files[0])
    return hashlib.sha256(repr(data.used).encode()).hexdigest()
