"""From a checked configuration to the prompts and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.loader import FixedPrompts
from reinforce_rl.data.prompts import PromptDataset, RLHFDatasets, build_train_valid_test_rlhf_datasets
from reinforce_rl.data.sampler import PromptSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_datasets(cfg: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> RLHFDatasets:
    """The prompts of `model.data.data_prefix`."""
    data = cfg.model.data
    datasets = build_train_valid_test_rlhf_datasets(
        tokenizer,
        {key: value for key, value in vars(data.data_prefix).items() if value is not None},
        max_prompt_tokens=cfg.model.max_prompt_tokens,
        too_long=data.too_long,  # type: ignore[arg-type]
        apply_chat_template=data.apply_chat_template,
        add_bos=data.add_bos,
    )
    if datasets.validation is not None:
        FixedPrompts(datasets.validation, cfg.model.reinforce.num_val_samples)  # refuses a size that it has not
    return datasets


def build_sampler(cfg: TrainConfig, train_set: PromptDataset) -> PromptSampler:
    """The order of the training prompts."""
    return PromptSampler(
        len(train_set),
        cfg.model.reinforce.num_rollout_samples,
        seed=cfg.model.seed,
        shuffle=cfg.model.data.shuffle,
        max_epochs=cfg.trainer.reinforce.max_epochs,
        blend=train_set.blend,
    )
