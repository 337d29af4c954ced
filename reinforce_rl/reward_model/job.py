"""The job of `reinforce-rl train-rm`: data and a model folder in, a trained reward model and its card out.

output_dir/ of mode=head                of mode=full
  head.safetensors                        model/           the best so far, a ...ForSequenceClassification folder
  README.md    its card                   evaluation.json  its held-out evaluation
                                          checkpoints/     as in the actor's runs
                                          metrics.jsonl  report.html  config.yaml
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from reinforce_rl.reward_model import head as heads
from reinforce_rl.reward_model.data import EncodedPair, Examples, end_of_turn_ids, load_examples, longest_example
from reinforce_rl.reward_model.head import CUT, WHOLE
from reinforce_rl.reward_model.objectives import Best, Objective, Ranking, Regression, pair_accuracy
from reinforce_rl.reward_model.scorer import load_trunk
from reinforce_rl.reward_model.train_full import FullTrainer, RewardModelMonitor, TrainableRewardModel, load_trainable
from reinforce_rl.runtime.settings import CONFIG_FILE, compare, read_tree
from reinforce_rl.runtime.stored_config import config_text, read_stored
from reinforce_rl.trainer.build import DTYPES, check_vocabulary, model_options
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import make_readable, write_atomically

LINE_EVERY_SECONDS = 30.0
HEAD_FILE = "head.safetensors"
MODEL_FOLDER = "model"
CARD_FILE = "README.md"
# With another value of one of these, the steps before and after it belong to different runs.
MEANING = re.compile(r"model\.restore_from_path$|data\.|full\.(objective|attributes|pooling|global_batch_size)$|seed$")


def train_reward_model(cfg: TrainRewardModelConfig, *, command: str) -> heads.TrainedHead | FullTrainer:
    """Run the job of `cfg.mode` on this rank. `command` goes into the card.

    Raises:
        ReinforceError: the data, the model, a file or a checkpoint cannot be used.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    recorded = Path(cfg.output_dir) / CONFIG_FILE
    is_resumed = cfg.mode == "full" and cfg.full.resume_if_exists and recorded.is_file()
    tree = read_tree(read_stored(recorded)) if is_resumed else {}
    cfg.data.freeze_date(cfg.model.restore_from_path, tree.get("data", {}).get("chat_template_date"))
    if cfg.mode == "head":
        return _run_head(cfg, command, Console())
    model = cfg.model
    sizes = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    with parallel_mesh(*sizes, sequence_parallel=model.sequence_parallel, seed=cfg.seed) as mesh:
        return _run_full(cfg, mesh, command)


# A head on a frozen trunk


def _run_head(cfg: TrainRewardModelConfig, command: str, console: Console) -> heads.TrainedHead:
    start, trunk, cut = time.monotonic(), Path(cfg.model.restore_from_path), cfg.cuts.evaluate_at
    tokenizer = load_tokenizer(trunk)
    check_vocabulary(tokenizer, Architecture.from_folder(trunk), trunk)
    data = load_examples(cfg, tokenizer)
    train, held_out = data.train_rows, data.held_out_rows
    console.print(
        f"{data.num_lines} pairs read, {len(data.used)} used: {len(train)} to train on, {len(held_out)} held out"
    )
    for line in data.skipped_lines:
        console.print(line, style="bold yellow" if line.startswith("W") else None, soft_wrap=True)

    trunk_sha256 = heads.sha256_of_trunk(trunk)
    end = end_of_turn_ids(ChatRenderer(tokenizer, cfg.data.template_options("data.")))
    made = heads.synthetic_negatives(data.used, cfg.degenerate.fraction, cfg.cuts, end=end, seed=cfg.seed)
    sequences = heads.cut_sequences(data.used, cfg.cuts, cfg.seed)
    for item in made:
        tokens = (data.used[item.pair].prompt + item.tokens)[: longest_example(cfg)]
        sequences.append(heads.CutSequence(tokens, (len(tokens),)))
    features = _features(cfg, sequences, trunk_sha256, console)

    trained: dict[str, heads.TrainedHead] = {}
    accuracies: dict[str, list[str]] = {}  # of training, held-out and held-out cut answers, and against made ones
    for pooling in cfg.head.poolings:
        views = heads.HeadData(features[pooling], [pair.prompt_key for pair in data.used], made)
        to_fit, extra = views.pairs(train, views.trained_views), views.against_made(train)
        found = trained[pooling] = heads.train_head(to_fit, pooling, cfg.head, seed=cfg.seed + 1, extra=extra)
        parts = [views.pairs(rows, [view]) for rows, view in ((train, WHOLE), (held_out, WHOLE), (held_out, CUT))]
        measured = [heads.head_accuracy(found.head, part) for part in (*parts, views.against_made(held_out)) if part]
        accuracies[pooling] = [*map(str, measured), ""][:4]
    # Cross-validation only: held-out pairs must not select the pooling.
    best = min(trained.values(), key=lambda one: one.validation.loss)
    pooling = best.head.pooling

    lengths = torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in data.held_out])
    baselines = [str(pair_accuracy(*values.t())) for values in (lengths, lengths.clamp(max=cut))]
    titles = ("", "whole", f"cut to {cut}", "above made", "CV acc.", "CV loss")
    rows: list[tuple[str, ...]] = [("longer answer wins", *baselines, "", "", "")]
    for name, one in trained.items():
        folds, mark = one.validation, " (written)" if one is best else ""
        validation = ("", "") if math.isnan(folds.loss) else (f"{folds.accuracy:.3f}", f"{folds.loss:.4f}")
        rows.append((f"{name}{mark}", *accuracies[name][1:], *validation))
    about = {
        "trunk": _folder_name(cfg),
        "trunk_sha256": trunk_sha256,
        "data_file": _data_name(cfg),
        "data_sha256": _sha256_of_data(cfg, data),
        "train_pairs": str(len(train)),
        "held_out_pairs": str(len(held_out)),
        "held_out_accuracy": accuracies[pooling][1],
        f"held_out_accuracy_at_{cut}_tokens": accuracies[pooling][2],
        "l2": f"{best.l2:g}",
        "raw_mean": f"{best.raw_mean:.6g}",
        "raw_std": f"{best.raw_std:.6g}",
        "package_version": reinforce_rl.__version__,
    }
    lines = "\n".join(f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows))
    evaluation = f"{lines}\n\nOn its own training pairs the head reaches {accuracies[pooling][0]}."
    card = _head_card(cfg, data, best, about, evaluation, command, time.monotonic() - start)
    path = Path(cfg.output_dir) / HEAD_FILE
    with heads.replaced(path) as part:
        best.head.save(part, about)
        make_readable(part)  # safetensors makes files that only their owner can read
        write_atomically(path.with_name(CARD_FILE), card)
    table = Table(title=f"Share of {len(held_out)} held-out pairs ordered rightly, ± standard error", box=SIMPLE)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"written: {path} and README.md beside it", soft_wrap=True)
    return best


def _features(
    cfg: TrainRewardModelConfig, sequences: list[heads.CutSequence], trunk_sha256: str, console: Console
) -> dict[str, Tensor]:
    fingerprint = heads.features_fingerprint(trunk_sha256, sequences, cfg.head.poolings)
    cached = None if cfg.features_cache is None else heads.load_features(cfg.features_cache, fingerprint)
    if cached is not None:
        console.print(f"features from {cfg.features_cache}", soft_wrap=True)
        return cached
    size, poolings = cfg.micro_batch_size, cfg.head.poolings
    with parallel_mesh(seed=cfg.seed) as mesh:
        trunk = load_trunk(cfg.model.restore_from_path, mesh).eval()
        with _progress(console, "features", sum(len(s.tokens) for s in sequences)) as advance:
            features = heads.pooled_features(trunk, sequences, poolings, size, device=mesh.device, on_progress=advance)
    if cfg.features_cache is not None:
        heads.save_features(cfg.features_cache, features, fingerprint)
    return features


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, else print a line every `LINE_EVERY_SECONDS`."""
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        number = bar.add_task(name, total=total)
        task, start = bar.tasks[0], time.monotonic()
        last = start

        def advance(amount: int) -> None:
            nonlocal last
            bar.advance(number, amount)
            now = time.monotonic()
            if not console.is_terminal and now - last >= LINE_EVERY_SECONDS:
                last, left = now, (now - start) / task.completed * (total - task.completed)
                console.print(f"{name}: {task.percentage:.0f}%, about {left:.0f} s left")

        yield advance


# All weights


def _run_full(cfg: TrainRewardModelConfig, mesh: Mesh, command: str) -> FullTrainer:
    folder, source, full, optim = Path(cfg.output_dir), cfg.model.restore_from_path, cfg.full, cfg.model.optim
    checkpoints = folder / "checkpoints"
    tokenizer = load_tokenizer(source)
    data = load_examples(cfg, tokenizer)
    sampler = PromptSampler(len(data.train_rows), full.global_batch_size, seed=cfg.seed, max_epochs=full.max_epochs)
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
        if full.pooling == "last" and pad_id is not None and pad_id == token_id(tokenizer.eos_token_id):
            monitor.note(
                "The tokenizer's padding token is its end-of-sequence token. transformers takes the last token that "
                "is no padding, so the score is read from the token before the end; full.pooling=mean reads all."
            )
        check_vocabulary(tokenizer, Architecture.from_folder(source), source)
        monitor.phase("loading the model")
        dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
        options = model_options(cfg.model)
        lm = load_trainable(source, mesh, objective.names, seed=cfg.seed, dtype=dtype, options=options)
        model = TrainableRewardModel(lm, full.pooling, pad_id, cfg.micro_batch_size, optim)
        adam, scheduler = build_optimizer(model.ddp, optim, clip_grad=full.gradient_clip_val, total_steps=steps)
        checkpointer = Checkpointer(checkpoints, mesh, model.ddp, adam, scheduler, keep_last=full.keep_last)

        def export(best: Best) -> None:
            model.export(source, folder / MODEL_FOLDER, objective.names, pad_id)
            if mesh.is_main:
                card = full_card(cfg, best, objective.names, data, command)
                write_atomically(folder / MODEL_FOLDER / CARD_FILE, card)
                write_atomically(folder / EVALUATION_FILE, json.dumps(dataclasses.asdict(best), indent=2))

        optimizer = ActorOptimizer(adam, scheduler)
        trainer = FullTrainer(model, optimizer, objective, data, sampler, checkpointer, monitor, export, steps, full)
        if checkpoint is not None:
            trainer.restore(checkpoint)
            monitor.note(f"Going on from {checkpoint.folder}, after step {start_step} of {steps}.")
        trainer.fit()
        if trainer.stopped_early and trainer.best is not None:
            since = trainer.best.step
            monitor.note(f"Ended after step {trainer.step} of {steps}: no lower held-out loss since step {since}.")
        if mesh.is_main:
            monitor.note(f"Report: {monitor.report()}")
            monitor.note(f"Model: {folder / MODEL_FOLDER}")
    return trainer


def _refuse_changes(folder: Path, settings: str) -> None:
    """Raise ConfigError if the run to resume had other values of the keys in `MEANING`."""
    file = folder / CONFIG_FILE
    changes = compare(read_stored(file), settings, TrainRewardModelConfig) if file.is_file() else {}
    refused = "; ".join(f"{key}: {values}" for key, values in changes.items() if MEANING.match(key))
    if refused:
        raise ConfigError(
            [
                Fault(
                    f"{folder} has checkpoints of a run with other settings: {refused}. Set them "
                    "back to go on, or choose another output_dir",
                    key="reward_model.resume.other_settings",
                )
            ]
        )


# Cards


def _head_card(
    cfg: TrainRewardModelConfig,
    data: Examples[EncodedPair],
    best: heads.TrainedHead,
    about: dict[str, str],
    evaluation: str,
    command: str,
    seconds: float,
) -> str:
    """Return the README beside a head; `about` is the metadata of its file."""
    trunk, cuts, limit = about["trunk"], cfg.cuts, cfg.data.max_answer_tokens
    pooled = "mean of the last layer's hidden states" if best.head.pooling == "mean" else "last token's hidden state"
    skipped = "; ".join(f"{count}: {reason}" for reason, count in data.skipped.items()) or "none"
    train_prompts, held_out_prompts = (len({p.prompt_key for p in part}) for part in (data.train, data.held_out))
    answers, made = "whole" if limit is None else f"the first {limit} tokens", "none"
    if cuts.per_pair:
        answers += (
            f", and {cuts.per_pair} beginnings of each pair's answers, of {cuts.min_tokens} to {cuts.max_tokens} "
            "tokens drawn evenly, the same for both (an answer that is shorter stays whole)"
        )
    if cfg.degenerate.fraction:
        made = (
            f"for {cfg.degenerate.fraction:.0%} of the pairs, one that ends at once or after up to "
            f"{heads.MAX_EARLY_TOKENS} tokens and one that repeats a phrase of up to {heads.MAX_PHRASE_TOKENS}, "
            "each to be scored below the pair's own"
        )
    return f"""# Reward head on {trunk}

A linear layer on the {pooled} of a frozen trunk, `{HEAD_FILE}`. It is of use with this
trunk alone: `{trunk}`, sha256 of weights and config `{about["trunk_sha256"][:16]}`.

- **Trained on** {about["train_pairs"]} preference pairs of {train_prompts} prompts from `{about["data_file"]}` (sha256
  `{about["data_sha256"][:16]}`), by Bradley-Terry loss with L2 {best.l2:g}, chosen by cross-validation on them.
- **Held out** {about["held_out_pairs"]} pairs of {held_out_prompts} prompts; no prompt is on both sides.
- **Pairs left out**: {skipped}.
- **Answers**: {answers}.
- **Made answers**: {made}.
- **Scores** have mean 0 and standard deviation 1 over the training answers (before: {best.raw_mean:.3f} and
  {best.raw_std:.3f}, in log-odds).
- **Made by** reinforce_rl {reinforce_rl.__version__} in {seconds:.0f} s:

```
{command}
```

Share of held-out pairs ordered rightly, ± one standard error, on whole answers and on answers cut to
{cuts.evaluate_at} tokens; how often a real answer is above a made one; and cross-validation inside the training pairs
(CV, whole and cut answers together; a loss of 0.6931 nats is a guess), by which pooling and L2 strength are chosen
where there is a choice.

{evaluation}
"""


def full_card(
    cfg: TrainRewardModelConfig, best: Best, names: tuple[str, ...], data: Examples[Any], command: str
) -> str:
    """Return the README of a fully trained reward model; `names` is empty for a single score."""
    metrics, train, held_out = best.evaluation.metrics, len(data.train_rows), len(data.held_out_rows)
    kind = "rated answers, by squared error" if names else "preference pairs, by Bradley-Terry loss"
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in metrics.items())
    if names:
        scores = f"Its scores are {', '.join(names)}, in the units of the ratings."
        options = f"'reward_model.attribute_weights={{{', '.join(f'{name}: 1.0' for name in names)}}}'"
    else:
        scores = (
            "Its score has the scale of log-odds: sigmoid of a difference of two is the probability that the "
            "first answer is preferred."
        )
        mean, deviation = metrics["score_mean"], metrics["score_deviation"]
        options = f"reward_model.mean={mean:.4f} reward_model.deviation={deviation:.4f}"
    pooling = "The score is read from the last token that is no padding, as transformers does."
    if cfg.full.pooling != "last":
        pooling = (
            "**The score is read from the mean of all hidden states** (`reward_pooling` in config.json), which "
            "this project's server knows and transformers does not: there the scores are other ones."
        )
    return f"""# Reward model from {_folder_name(cfg)}

All weights and a linear head, trained on {train} {kind}, from `{_data_name(cfg)}`.
{scores} {pooling}

Best on {held_out} held-out examples after step {best.step}: loss {best.evaluation.loss:.4f}. No prompt is on both
sides.

| | held out |
|---|---|
{rows}

Serve it:

```
reinforce-rl serve reward_model.restore_from_path=FOLDER \\
    {options}
```

Made by reinforce_rl {reinforce_rl.__version__}:

```
{command}
```
"""


def _folder_name(cfg: TrainRewardModelConfig) -> str:
    return Path(cfg.model.restore_from_path).resolve().name


def _sha256_of_data(cfg: TrainRewardModelConfig, data: Examples[EncodedPair]) -> str:
    """Return the hash of the file of pairs; of the tokenised pairs, where they come from no single file."""
    files = files_of(cfg.data.pairs_path or "")
    if len(files) == 1 and files[0].is_file():
        return heads.sha256_of_file(files[0])
    return hashlib.sha256(repr(data.used).encode()).hexdigest()


def _data_name(cfg: TrainRewardModelConfig) -> str:
    return Path(cfg.data.ratings_path or cfg.data.pairs_path or "").name
