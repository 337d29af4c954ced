"""The whole job of `examples/train_reward_model.py`: pairs and a trunk in, a head file and its model card out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.reward_model.config import CutsConfig, TrainRewardModelConfig
from reinforce_rl.reward_model.evaluation import pair_accuracy
from reinforce_rl.reward_model.head.features import (
    CutSequence,
    features_fingerprint,
    load_features,
    pooled_features,
    save_features,
)
from reinforce_rl.reward_model.head.synthetic_negatives import MAX_EARLY_TOKENS, MAX_PHRASE_TOKENS, degenerate_answers
from reinforce_rl.reward_model.head.training import PairFeatures, head_accuracy, train_head
from reinforce_rl.reward_model.model_card import HeadReport, PoolingResult, sha256_of_file, sha256_of_files, write_head
from reinforce_rl.reward_model.pairs import EncodedPair, encode_pairs, left_out, read_pairs, split_by_prompt
from reinforce_rl.reward_model.template import end_of_turn_id

LINE_EVERY_SECONDS = 30.0
WHOLE, CUT = 0, 1  # columns of `_cuts`: the whole answer, the answer cut for evaluation; then those trained on


def train_reward_model(config: TrainRewardModelConfig, *, command: str, console: Console | None = None) -> HeadReport:
    """Read, split, extract features, train, measure, write, and print a table.

    Args:
        config: checked already.
        command: how the run was started, for the model card.
        console: where to print; None is standard output.

    Raises:
        ReinforceError: the data, the trunk or a file cannot be used; the text says which and why.
    """
    console, start = console or Console(), time.monotonic()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    data, trunk_folder = config.data, Path(config.model.restore_from_path)
    assert data.pairs_path is not None  # checked
    lines = read_pairs(data.pairs_path)
    tokenizer = load_tokenizer(trunk_folder)
    encoded = encode_pairs(
        lines,
        tokenizer,
        max_length=config.max_length,
        max_answer_tokens=data.max_answer_tokens,
        max_pairs=data.max_pairs,
        single_turn_only=data.single_turn_only,
        seed=config.seed,
    )
    pairs = encoded.pairs
    keys = [pair.prompt_key for pair in pairs]
    train, held_out = split_by_prompt(keys, data.held_out_fraction, config.seed)
    console.print(f"{len(lines)} pairs read, {len(pairs)} used: {len(train)} to train on, {len(held_out)} held out")
    for line in left_out(encoded.skipped, len(lines)):
        console.print(line, style="bold yellow" if line.startswith("W") else None, soft_wrap=True)

    trunk_sha256 = sha256_of_files([*trunk_folder.glob("*.safetensors"), trunk_folder / "config.json"])
    made = degenerate_answers(
        pairs,
        config.degenerate.fraction,
        end_id=end_of_turn_id(tokenizer),
        min_tokens=config.cuts.min_tokens,
        max_tokens=config.cuts.max_tokens,
        seed=config.seed,
    )
    sequences = _cut_sequences(pairs, config.cuts, config.seed)
    for item in made:
        tokens = (pairs[item.pair].prompt + item.tokens)[: config.max_length]
        sequences.append(CutSequence(tokens, (len(tokens),)))
    features = _features(config, sequences, trunk_sha256, console)
    views = 2 + config.cuts.per_pair
    first_made = 2 * views * len(pairs)

    def view(pooling: str, rows: Sequence[int], columns: Sequence[int]) -> PairFeatures:
        """Features of these pairs in these views of their answers, pair-major."""
        # [pairs, chosen or rejected, views, h]
        table = features[pooling][:first_made].view(len(pairs), 2, views, -1)[list(rows)][:, :, list(columns)]
        repeated = tuple(keys[row] for row in rows for _ in columns)
        return PairFeatures(table[:, 0].flatten(0, 1), table[:, 1].flatten(0, 1), repeated)

    def made_view(pooling: str, rows: Sequence[int]) -> PairFeatures | None:
        """Real answers of these pairs, cut, as chosen, and the answers made from them as rejected."""
        wanted = set(rows)
        chosen = [number for number, item in enumerate(made) if item.pair in wanted]
        if not chosen:
            return None
        table = features[pooling][:first_made].view(len(pairs), 2, views, -1)
        real = torch.stack([table[made[n].pair, made[n].better, CUT] for n in chosen])
        return PairFeatures(real, features[pooling][first_made:][chosen], tuple(keys[made[n].pair] for n in chosen))

    trained_on = [WHOLE, *range(2, views)]
    results = {}
    for pooling in config.head.poolings:
        trained = train_head(
            view(pooling, train, trained_on),
            pooling,
            l2_grid=config.head.l2,
            folds=config.head.folds,
            seed=config.seed + 1,
            extra=made_view(pooling, train),
            cross_validate_always=len(config.head.poolings) > 1,
        )
        made_held_out = made_view(pooling, held_out)
        results[pooling] = PoolingResult(
            trained,
            train_whole=head_accuracy(trained.head, view(pooling, train, [WHOLE])),
            held_out_whole=head_accuracy(trained.head, view(pooling, held_out, [WHOLE])),
            held_out_cut=head_accuracy(trained.head, view(pooling, held_out, [CUT])),
            held_out_degenerate=None if made_held_out is None else head_accuracy(trained.head, made_held_out),
        )
    lengths = torch.tensor([[len(pairs[i].chosen), len(pairs[i].rejected)] for i in held_out])
    cut_lengths = lengths.clamp(max=config.cuts.evaluate_at)
    report = HeadReport(
        trunk=trunk_folder.resolve().name,
        trunk_sha256=trunk_sha256,
        data_file=Path(data.pairs_path).name,
        data_sha256=sha256_of_file(data.pairs_path),
        skipped=encoded.skipped,
        train_pairs=len(train),
        train_prompts=len({keys[i] for i in train}),
        held_out_pairs=len(held_out),
        held_out_prompts=len({keys[i] for i in held_out}),
        cut_answers=_cuts_in_words(config),
        degenerate=_made_in_words(config),
        evaluate_at=config.cuts.evaluate_at,
        baseline_whole=pair_accuracy(lengths[:, 0], lengths[:, 1]),
        baseline_cut=pair_accuracy(cut_lengths[:, 0], cut_lengths[:, 1]),
        results=results,
        # The held-out pairs have no say in this.
        pooling=min(results, key=lambda pooling: results[pooling].trained.chosen_validation.loss),
        command=command,
        seconds=time.monotonic() - start,
    )
    path = write_head(report, config.output_dir)
    _print_table(report, console)
    console.print(f"written: {path} and README.md beside it", soft_wrap=True)
    return report


def _cut_sequences(pairs: Sequence[EncodedPair], cuts: CutsConfig, seed: int) -> list[CutSequence]:
    """Chosen and rejected of each pair, pair-major, both with the same `2 + cuts.per_pair` cuts of the answer."""
    rng = random.Random(seed)
    sequences = []
    for pair in pairs:
        drawn = [rng.randint(cuts.min_tokens, cuts.max_tokens) for _ in range(cuts.per_pair)]
        for answer in (pair.chosen, pair.rejected):
            lengths = [len(answer), *(min(cut, len(answer)) for cut in (cuts.evaluate_at, *drawn))]
            sequences.append(CutSequence(pair.prompt + answer, tuple(len(pair.prompt) + n for n in lengths)))
    return sequences


def _features(
    config: TrainRewardModelConfig, sequences: list[CutSequence], trunk_sha256: str, console: Console
) -> dict[str, Tensor]:
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.reward_model.scorer import load_trunk

    fingerprint = features_fingerprint(trunk_sha256, sequences, config.head.poolings)
    if config.features_cache is not None:
        cached = load_features(config.features_cache, fingerprint)
        if cached is not None:
            console.print(f"features from {config.features_cache}", soft_wrap=True)
            return cached
    with parallel_mesh(seed=config.seed) as mesh:
        trunk = load_trunk(config.model.restore_from_path, mesh).eval()
        with _progress(console, "features", sum(len(s.tokens) for s in sequences)) as advance:
            features = pooled_features(
                trunk,
                sequences,
                config.head.poolings,
                micro_batch_size=config.micro_batch_size,
                device=mesh.device,
                on_progress=advance,
            )
    if config.features_cache is not None:
        save_features(config.features_cache, features, fingerprint)
    return features


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on a terminal; elsewhere a line now and then, so that a log file stays readable."""
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


def _cuts_in_words(config: TrainRewardModelConfig) -> str:
    cuts, limit = config.cuts, config.data.max_answer_tokens
    whole = "whole" if limit is None else f"the first {limit} tokens"
    if not cuts.per_pair:
        return whole
    return (
        f"{whole}, and {cuts.per_pair} beginnings of each pair's answers, of {cuts.min_tokens} to {cuts.max_tokens} "
        "tokens drawn evenly, the same for both (an answer that is shorter stays whole)"
    )


def _made_in_words(config: TrainRewardModelConfig) -> str:
    if not config.degenerate.fraction:
        return "none"
    return (
        f"for {config.degenerate.fraction:.0%} of the pairs, one that ends at once or after up to {MAX_EARLY_TOKENS} "
        f"tokens and one that repeats a phrase of up to {MAX_PHRASE_TOKENS}, each to be scored below the pair's own"
    )


def _print_table(report: HeadReport, console: Console) -> None:
    table = Table(
        title=f"Share of {report.held_out_pairs} held-out pairs ordered rightly, ± standard error", box=SIMPLE
    )
    for number, title in enumerate(report.columns):
        table.add_column(title, justify="right" if number else "left")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
