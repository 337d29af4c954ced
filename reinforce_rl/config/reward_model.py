"""Schema and rules of `reinforce-rl train-rm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from reinforce_rl.config.actor import RanksConfig
from reinforce_rl.config.base import (
    NOT_SET,
    Count,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Section,
    Steps,
    Text,
    key,
)
from reinforce_rl.config.model import OptimConfig, ParallelConfig
from reinforce_rl.config.model_folder import no_model
from reinforce_rl.config.parallelism import model_faults, ranks_faults, recomputation_faults
from reinforce_rl.config.template import TemplateConfig
from reinforce_rl.data.readers import source_fault
from reinforce_rl.errors import Fault, key_of
from reinforce_rl.utils.files import folder_faults

_HELPSTEER = ["helpfulness", "correctness", "coherence", "complexity", "verbosity"]


class TrunkConfig(ParallelConfig):
    restore_from_path: PathText = key(
        NOT_SET,
        "a Hugging Face folder with safetensors and a chat template: the trunk",
        kind="path",
    )
    optim: OptimConfig = OptimConfig(lr=1e-5)


class FullConfig(Section):
    objective: Literal["ranking", "regression"] = key(
        "ranking",
        "ranking: Bradley-Terry on data.pairs_path; regression: squared error on data.ratings_path",
    )
    attributes: list[Text] = key(_HELPSTEER, "of regression, one score each")
    pooling: Literal["mean", "last"] = key(
        "last",
        "last: hidden state of the last token, as in transformers; mean, which transformers does "
        "not know",
    )
    global_batch_size: Count = key(64, "pairs or rated answers per optimizer step", "examples")
    max_epochs: Count = key(1, "passes over the training examples", "epochs")
    max_steps: Steps = key(
        -1,
        "optimizer steps at most; -1 for all of max_epochs",
        "optimizer steps",
        expected="at least 1, or -1 for all of full.max_epochs",
    )
    val_check_interval: Count = key(
        100,
        "optimizer steps between evaluations on the held-out part; a checkpoint follows each",
        "optimizer steps",
    )
    patience: Count | None = key(
        3,
        "end after this many evaluations without a lower loss; null for never",
        "evaluations",
    )
    gradient_clip_val: NonNegative = key(1.0, "bound on the gradient's norm; 0 for none")
    keep_last: Count = key(2, "checkpoints to keep")
    resume_if_exists: bool = key(True, "resume from the newest checkpoint in output_dir")


class PairFieldsConfig(Section):
    prompt: Text | None = key(None, "column of the prompts; null: prompt or messages")
    chosen: Text | None = key(None)
    rejected: Text | None = key(None)
    response: Text | None = key(None, "of regression")


class PairsConfig(TemplateConfig):
    fields: PairFieldsConfig = PairFieldsConfig()
    pairs_path: PathText | None = key(
        None,
        'JSONL, CSV, Parquet, ... of {"prompt", "chosen", "rejected"}; prompt: HH format, plain '
        "text, or messages",
        kind="path",
    )
    ratings_path: PathText | None = key(
        None,
        'of regression: {"prompt", "response", "attributes": {NAME: number}}, in any of these '
        "forms",
        kind="path",
    )
    max_length: int | None = key(
        None,
        "longest prompt with answer, longer ones are left out; null: the trunk's context",
        "tokens",
        ge=2,
    )
    max_pairs: int | None = key(
        None, "pairs, or rated answers, drawn by the seed; null: all", "examples", ge=2
    )
    max_answer_tokens: Count | None = key(
        None, "cut every answer there, in training and in evaluation", "tokens"
    )
    held_out_fraction: float = key(
        0.2,
        "share of the prompts held out from training, by seed and prompt",
        gt=0,
        lt=1,
        expected="above 0 and below 1, for instance 0.2",
    )
    single_turn_only: bool = key(False, "leave out conversations of several turns")


class PrefixesConfig(Section):
    per_pair: Natural = key(4, "0 trains on whole answers only")
    min_tokens: Count = key(8, "", "tokens")
    max_tokens: int = key(32, "", "tokens")
    evaluate_at: Count = key(24, "also report held-out accuracy for answers cut here", "tokens")


class DegenerateConfig(Section):
    fraction: float = key(
        0.35, "of the pairs; 0 makes none", "share", ge=0, le=1, expected="from 0 to 1"
    )


class HeadConfig(Section):
    pooling: Literal["mean", "last"] = key("mean", "of the last layer's hidden states")
    l2: Positive = key(
        1e-3,
        "strength of the L2 penalty. Features are scaled so that chosen minus rejected has mean "
        "squared length 1: strengths are comparable between trunks and poolings",
    )


class TrainRewardModelConfig(Section):
    mode: Literal["head", "full"] = key(
        "head",
        "head: a convex fit on a frozen trunk, in one process; full: all weights, on any layout "
        "of ranks",
    )
    trainer: RanksConfig = key(RanksConfig(), "of mode=full")
    model: TrunkConfig = key(TrunkConfig(), "all but restore_from_path is of mode=full")
    full: FullConfig = key(FullConfig(), "of mode=full")
    data: PairsConfig = PairsConfig()
    prefixes: PrefixesConfig = key(
        PrefixesConfig(),
        "of mode=head: truncated answers to train on besides the whole ones, so that the head can "
        "score answers cut at an actor's max_length. They need no further forward pass: the trunk "
        "is causal",
    )
    degenerate: DegenerateConfig = key(
        DegenerateConfig(),
        "of mode=head: synthetic answers that end at once or repeat a phrase, made from the pairs' "
        "words. Preference data has none, but a policy can exploit them; the head learns to rank "
        "them below the pair's answers",
    )
    head: HeadConfig = key(HeadConfig(), "of mode=head")
    micro_batch_size: Count = key(8, "sequences in a forward pass", "sequences")
    num_threads: Count | None = key(None, "of torch; null leaves it as it is")
    seed: Natural = key(
        0, "draws held-out prompts, the pairs of max_pairs, prefixes, the order, a new head"
    )
    features_cache: PathText | None = key(
        None,
        "of mode=head: file to keep the features in, so that a second run needs no trunk",
        kind="path",
    )
    output_dir: PathText = key(
        "results/reward_head",
        "head: head.safetensors; full: model/, checkpoints/, report",
        kind="path",
    )

    def all_faults(self, faults_of_keys: list[str]) -> Iterator[str]:
        yield from faults_of_keys
        model = self.model
        folder = self.model.restore_from_path
        longest = self.data.max_length
        if folder != NOT_SET and not Path(folder).is_dir():
            yield Fault(
                f"model.restore_from_path is {folder}, which {no_model(folder)}",
                key="config.restore_from_path.no_model",
            )
        yield from _full(self) if self.mode == "full" else _head(self)
        yield from model_faults(
            folder, model.tensor_model_parallel_size, "model", "data.max_length", longest
        )
        yield from folder_faults("output_dir", self.output_dir)
        if self.prefixes.max_tokens < self.prefixes.min_tokens:
            yield Fault(
                f"prefixes.max_tokens is {self.prefixes.max_tokens}; expected at least "
                f"prefixes.min_tokens, which is {self.prefixes.min_tokens}",
                key="config.max_tokens.below_min_tokens",
            )


def _head(cfg: TrainRewardModelConfig) -> Iterator[str]:
    yield from _file("data.pairs_path", cfg.data.pairs_path)
    if cfg.data.ratings_path is not None:
        yield Fault(
            "data.ratings_path is given, but mode=head trains on pairs only; set mode=full",
            key="config.ratings_path.conflicts_with_mode_head",
        )
    if cfg.trainer.world_size != 1 or cfg.model.block_size != 1:
        yield Fault(
            "mode is head, which runs in one process; leave trainer.devices, trainer.num_nodes "
            "and the model's parallel sizes at 1, or set mode=full",
            key="config.mode.head_on_several_ranks",
        )


def _full(cfg: TrainRewardModelConfig) -> Iterator[str]:
    full = cfg.full
    data = cfg.data
    if full.objective == "regression":
        yield from _file("data.ratings_path", data.ratings_path)
        if data.pairs_path is not None:
            yield Fault(
                "data.pairs_path is given, but full.objective=regression trains "
                "on data.ratings_path; leave data.pairs_path out",
                key="config.pairs_path.conflicts_with_regression",
            )
        if not full.attributes or len(set(full.attributes)) < len(full.attributes):
            yield Fault(
                f"full.attributes is {full.attributes}; expected at least one name, and each once",
                key="config.attributes.empty_or_repeated",
            )
    elif full.objective == "ranking":
        yield from _file("data.pairs_path", data.pairs_path)
        if data.ratings_path is not None:
            yield Fault(
                "data.ratings_path is given, but full.objective=ranking trains "
                "on data.pairs_path; leave data.ratings_path out",
                key="config.ratings_path.conflicts_with_ranking",
            )
        if cfg.micro_batch_size == 1:
            yield Fault(
                "micro_batch_size is 1; full.objective=ranking scores both answers of a pair in "
                "one pass, so it needs at least 2",
                key="config.micro_batch_size.too_small_for_ranking",
            )
    yield from cfg.model.optim.faults()
    yield from ranks_faults(cfg.model, cfg.trainer.num_nodes, cfg.trainer.devices, "trainer.")
    yield from recomputation_faults(cfg.model)


def _file(key: str, path: str | None) -> Iterator[str]:
    if path is None:
        yield Fault(f"{key} is not set; give it as {key}=VALUE", key="config.value.not_set")
    elif fault := source_fault(path):
        yield Fault(f"{key}: {fault}", key=key_of(fault))
