"""Build the data sets of prompts and their sampler from a checked configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.data_prefix import SPLITS
from reinforce_rl.data.prompts import (
    PromptDataset,
    RLHFDatasets,
    build_train_valid_test_rlhf_datasets,
    fixed_prompts,
)
from reinforce_rl.data.readers import Columns
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.data.tool_calls import tool_format_of
from reinforce_rl.errors import DataError
from reinforce_rl.rewards.environment_pool import environment_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_datasets(
    cfg: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    splits: Sequence[str] = SPLITS,
    loads_environment: bool = True,
) -> RLHFDatasets:
    """Read the prompts.

    Args:
        loads_environment: import the environment, which may have tools for the prompts. False where
            it is code that nobody has trusted; the prompts then lack its tools.

    Raises the errors of `build_train_valid_test_rlhf_datasets`.
    """
    data = cfg.model.data
    prefixes = {key: value for key, value in vars(data.data_prefix).items() if value is not None}
    datasets = build_train_valid_test_rlhf_datasets(
        tokenizer,
        prefixes,
        splits=splits,
        max_prompt_tokens=cfg.max_prompt_tokens,
        too_long=data.too_long,  # type: ignore[arg-type]
        apply_chat_template=data.apply_chat_template,
        add_bos=data.add_bos,
        columns=Columns(data.fields.columns),
        system_prompt=data.system_prompt,
        template=data.template_options("model.data."),
        tools=_environment_tools(cfg, tokenizer) if loads_environment else (),
    )
    if cfg.has_environment:
        _check_conversations(datasets)
    if datasets.validation is not None:
        # raises if the set is smaller
        fixed_prompts(datasets.validation, cfg.model.reinforce.num_val_samples)
    return datasets


def _environment_tools(
    cfg: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Mapping[str, Any]]:
    """Return the tools that the environment describes to the policy.

    Raises ConfigError if the form of the model's calls is unknown, and the errors of the
    environment's start.
    """
    if not cfg.has_environment:
        return ()
    tools = environment_tools(cfg.environment)
    if tools is None:
        return ()
    renderer = ChatRenderer(tokenizer, cfg.model.data.template_options("model.data."))
    tool_format_of(renderer, cfg.environment.tool_format)
    # A model whose template does not read tools has them in its system message.
    return tools if renderer.reads_tools else ()


def _check_conversations(datasets: RLHFDatasets) -> None:
    """Raise a DataError if a prompt is a plain text, to which no turn can be added."""
    for split, prompts in vars(datasets).items():
        if prompts is None:
            continue
        for number in range(len(prompts)):
            if not prompts[number].messages:
                raise DataError(
                    f"prompt {number} of {split} is a plain text, but an environment answers in "
                    "conversations; give messages, or set model.data.apply_chat_template=true",
                    key="data.prompt.no_conversation",
                )


def build_sampler(cfg: TrainConfig, train_set: PromptDataset) -> PromptSampler:
    return PromptSampler(
        len(train_set),
        cfg.model.reinforce.num_rollout_samples,
        seed=cfg.model.seed,
        shuffle=cfg.model.data.shuffle,
        max_epochs=cfg.trainer.reinforce.max_epochs,
        blend=train_set.blend,
    )
