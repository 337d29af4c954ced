"""TRL's advantages and losses. In the peers' environment:

    python trl_side.py INPUTS.npz MODEL_FOLDER OUTPUTS.npz

The trainers are TRL's, made by their own constructors from their own configurations. Only sampling,
scoring and the model are replaced, by the numbers of the inputs. `_generate_and_score_completions`
and `_compute_loss`, which compute advantages, KL, ratios and losses, run unmodified. Keys of the
outputs are `<batch>/<name>/<quantity>`.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

BETA = 0.05
ENTROPY = 0.01
FIXED_LENGTH = 12
GENERATOR_CAP = 1.3
PROMPT = [5, 6]


class FromInputs:
    """Gives a TRL trainer the numbers of a batch in place of an engine, rewards and a model.

    Attributes:
        batch: by the names of `random_groups.Batch`.
        leaf: [N, T], the log-probabilities that the loss is differentiated by.
        scored: bool [N].
    """

    batch: dict[str, Tensor]
    leaf: Tensor
    scored: Tensor
    ref_model: Any
    gives_sampler_log_probs = False

    def _generate(self, prompts: list[Any]) -> tuple:
        lengths = self.batch["mask"].sum(-1).tolist()
        completions = [[7] * length for length in lengths]
        texts = ["x" * length for length in lengths]
        if not isinstance(self, GRPOTrainer):
            return [PROMPT] * len(prompts), completions, texts
        rows = zip(self.batch["generator_log_probs"], lengths, strict=True)
        sampler = (
            [row[:length].tolist() for row, length in rows]
            if self.gives_sampler_log_probs
            else None
        )
        return [PROMPT] * len(prompts), completions, None, texts, sampler, {}, None, None

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> Tensor:
        # TRL's own would round to float32. NaN is its mark of a sample that no reward function
        # scored.
        rewards = torch.where(self.scored, self.batch["rewards"], torch.nan)
        return rewards[:, None]

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **options: Any
    ) -> tuple[Tensor, Any, None]:
        if options.get("compute_entropy"):  # requested by the loss only
            return self.leaf, self.batch["entropy"], None
        name = "reference_log_probs" if model is self.ref_model else "old_log_probs"
        return self.batch[name], None, None


class Rloo(FromInputs, RLOOTrainer):
    pass


class Grpo(FromInputs, GRPOTrainer):
    pass


def trainer_of(
    kind: type, config: type, folder: str, batch: dict[str, Tensor], **settings: Any
) -> Any:
    count = len(batch["rewards"])
    groups = batch["group_ids"].unique()
    arguments = config(
        output_dir=tempfile.gettempdir(),  # nothing is written there: nothing is trained
        per_device_train_batch_size=count,
        num_generations=count // len(groups),
        max_completion_length=FIXED_LENGTH,
        pad_to_multiple_of=None,
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    prompts = Dataset.from_list([{"prompt": "x"}] * count)
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.batch = batch
    return trainer


def outputs_of(trainer: Any, *, scored: Tensor | None = None) -> dict[str, Tensor]:
    batch = trainer.batch
    trainer.scored = torch.ones_like(batch["scored"]) if scored is None else scored
    prompts = [{"prompt": "x"}] * len(batch["rewards"])
    inputs = trainer._generate_and_score_completions(prompts)
    trainer.leaf = batch["log_probs"].clone().requires_grad_()
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.leaf)
    return {"advantages": inputs["advantages"], "loss": loss.detach(), "gradient": gradient}


def rloo_of(folder: str, batch: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    trainer = trainer_of(Rloo, RLOOConfig, folder, batch, beta=BETA)
    return {
        "rloo": outputs_of(trainer),
        "rloo/unscored": outputs_of(trainer, scored=batch["scored"]),
        "rloo/no_kl": outputs_of(trainer_of(Rloo, RLOOConfig, folder, batch, beta=0.0)),
    }


def grpo_of(folder: str, batch: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    def trainer(loss_type: str, **settings: Any) -> Any:
        # Two passes: GRPOTrainer asks for the old policy's numbers only where it is not the one
        # that trains.
        settings = {"num_iterations": 2, "use_bias_correction_kl": False, **settings}
        return trainer_of(Grpo, GRPOConfig, folder, batch, loss_type=loss_type, **settings)

    results = {name: outputs_of(trainer(name)) for name in ("grpo", "bnpo", "dr_grpo", "dapo")}
    results["grpo/unscored"] = outputs_of(trainer("grpo"), scored=batch["scored"])
    results["grpo/on_policy"] = outputs_of(trainer("grpo", num_iterations=1))
    results["grpo/kl"] = outputs_of(trainer("grpo", beta=BETA))
    results["grpo/weighted_kl"] = outputs_of(
        trainer("grpo", beta=BETA, num_iterations=1, use_bias_correction_kl=True)
    )
    results["grpo/sequence"] = outputs_of(trainer("grpo", importance_sampling_level="sequence"))
    results["dr_grpo/no_scale"] = outputs_of(trainer("dr_grpo", scale_rewards="none"))
    results["dapo/asymmetric"] = outputs_of(trainer("dapo", epsilon_high=0.28))
    results["dapo/entropy"] = outputs_of(trainer("dapo", entropy_coef=ENTROPY))
    for mode in ("token_truncate", "sequence_truncate"):
        corrected = trainer(
            "dapo",
            beta=BETA,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=GENERATOR_CAP,
        )
        # Set after the constructor, which would start vLLM; the correction is TRL's.
        corrected.use_vllm = True
        corrected.gives_sampler_log_probs = True
        results[f"dapo/{mode}"] = outputs_of(corrected)
    return results


def main(inputs: str, folder: str, outputs: str) -> None:
    torch.set_num_threads(1)
    with np.load(inputs) as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}
    results = {}
    for i in sorted({key.split("/")[0] for key in arrays}):
        keys = [key for key in arrays if key.startswith(f"{i}/")]
        batch = {key.split("/")[1]: arrays[key] for key in keys}
        for name, values in {**rloo_of(folder, batch), **grpo_of(folder, batch)}.items():
            for quantity, value in values.items():
                results[f"{i}/{name}/{quantity}"] = value.numpy()
    np.savez(outputs, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
