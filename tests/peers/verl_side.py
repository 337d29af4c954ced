"""verl's advantages and losses. In the peers' environment:

    python verl_side.py INPUTS.npz OUTPUTS.npz

Every number comes out of verl's functions; this file hands them tensors. Keys of the outputs are
`<batch>/<name>`.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

GRPO_EPSILON = 1e-4  # of this project and of TRL; verl's trainer leaves its own 1e-6
BETA = 0.05
GAMMA = 0.9
ENTROPY = 0.01
FIXED_LENGTH = 12
NO_DUAL_CLIP = 1e9  # verl cannot switch its dual clip off
GENERATOR_CAP = 1.3
ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def actor_config(aggregation: str, **others: object) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=aggregation,
        clip_ratio_c=NO_DUAL_CLIP,
        loss_scale_factor=FIXED_LENGTH,
        **others,
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    return config


def token_rewards(batch: dict[str, Tensor]) -> Tensor:
    """A reward at the last token of each response, as verl's reward managers do: [N, T]."""
    scores = torch.zeros_like(batch["log_probs"])
    last = batch["mask"].sum(-1) - 1
    scores[torch.arange(len(last)), last] = batch["rewards"]
    return scores


def with_kl(batch: dict[str, Tensor], estimator: str) -> tuple[Tensor, float]:
    """Token rewards with verl's KL in them [N, T], and its steered coefficient after the step."""
    columns = {
        "response_mask": batch["mask"].double(),
        "token_level_scores": token_rewards(batch),
        "old_log_probs": batch["old_log_probs"],
        "ref_log_prob": batch["reference_log_probs"],
    }
    data = DataProto.from_dict(columns)
    controller = core_algos.AdaptiveKLController(init_kl_coef=BETA, target_kl=0.1, horizon=1000)
    data, _ = ray_trainer.apply_kl_penalty(data, controller, kl_penalty=estimator)
    return data.batch["token_level_rewards"], float(controller.value)


def advantages_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    index = batch["group_ids"].numpy()
    common = {"response_mask": batch["mask"].double(), "index": index}
    plus_plus_baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    # Each call gets a copy of the rewards: verl's functions write into their arguments.
    results = {
        "rloo": core_algos.compute_rloo_outcome_advantage(token_rewards(batch), **common),
        "rloo_vectorized": core_algos.compute_rloo_vectorized_outcome_advantage(
            token_rewards(batch), **common
        ),
        "grpo": core_algos.compute_grpo_outcome_advantage(
            token_rewards(batch), epsilon=GRPO_EPSILON, **common
        ),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(
            token_rewards(batch), norm_adv_by_std_in_grpo=False, **common
        ),
        "reinforce_plus_plus_baseline": plus_plus_baseline(token_rewards(batch), **common),
    }
    for gamma in (1.0, GAMMA):
        rewards, _ = with_kl(batch, "kl")
        whitened, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, common["response_mask"], config=AlgoConfig(gamma=gamma)
        )
        results[f"reinforce_plus_plus/{gamma}"] = (whitened, returns)
        results[f"returns_to_go/{gamma}"] = (returns, returns)
    for estimator in ESTIMATORS:
        rewards, _ = with_kl(batch, estimator)
        results[f"rloo_with_kl/{estimator}"] = core_algos.compute_rloo_outcome_advantage(
            rewards, **common
        )
    return {name: values for name, (values, _) in results.items()}


def losses_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each loss and its gradient with respect to the policy's token log-probabilities."""
    mask = batch["mask"]
    index = batch["group_ids"].numpy()
    advantages, _ = core_algos.compute_rloo_outcome_advantage(
        token_rewards(batch), mask.double(), index
    )
    results: dict[str, Tensor] = {}

    def record(name: str, loss: Tensor, leaf: Tensor) -> None:
        (gradient,) = torch.autograd.grad(loss, leaf)
        results[f"loss/{name}"] = loss.detach()
        results[f"gradient/{name}"] = gradient

    def policy(name: str, mode: str, aggregation: str, weights: Tensor | None = None) -> None:
        leaf = batch["log_probs"].clone().requires_grad_()
        function = core_algos.get_policy_loss_fn(mode)
        config = actor_config(aggregation)
        loss, _ = function(
            batch["old_log_probs"], leaf, advantages, mask, aggregation, config, weights
        )
        record(name, loss, leaf)

    for aggregation in AGGREGATIONS:
        policy(f"clip/{aggregation}", "vanilla", aggregation)
    policy("gspo", "gspo", "seq-mean-token-mean")
    for level in ("token", "sequence"):
        log_ratios = batch["old_log_probs"] - batch["generator_log_probs"]
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratios,
            mask,
            rollout_is=level,
            rollout_is_threshold=GENERATOR_CAP,
        )
        policy(f"generator/{level}", "vanilla", "token-mean", weights)
    for aggregation in AGGREGATIONS:
        leaf = batch["log_probs"].clone().requires_grad_()
        loss, _ = core_algos.compute_policy_loss_reinforce(
            batch["generator_log_probs"],
            leaf,
            advantages,
            mask,
            aggregation,
            actor_config(aggregation),
        )
        record(f"reinforce/{aggregation}", loss, leaf)
    for estimator in ESTIMATORS:
        for aggregation in AGGREGATIONS:
            leaf = batch["log_probs"].clone().requires_grad_()
            record(
                f"whole/{estimator}/{aggregation}",
                whole_loss(batch, advantages, leaf, estimator, aggregation),
                leaf,
            )
    return results


def whole_loss(
    batch: dict[str, Tensor], advantages: Tensor, leaf: Tensor, estimator: str, aggregation: str
) -> Tensor:
    """verl's `ppo_loss`: the clipped policy term, the entropy and the KL, as its actor trains."""
    lengths = batch["mask"].sum(-1).tolist()

    def packed(values: Tensor) -> Tensor:
        # One prompt token before each response; verl reads a response's values one position to the
        # left.
        pairs = zip(values, lengths, strict=True)
        rows = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in pairs]
        return torch.cat(rows)

    rows = [torch.zeros(length, dtype=torch.long) for length in lengths]
    columns = {
        "prompts": torch.nested.as_nested_tensor(
            [torch.zeros(1, dtype=torch.long) for _ in lengths], layout=torch.jagged
        ),
        "responses": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "response_mask": batch["mask"],
        "old_log_probs": batch["old_log_probs"],
        "ref_log_prob": batch["reference_log_probs"],
        "advantages": advantages,
        "dp_size": NonTensorData(1),
        "batch_num_tokens": NonTensorData(sum(lengths)),
        "global_batch_size": NonTensorData(len(lengths)),
    }
    data = TensorDict(
        columns,
        batch_size=[len(lengths)],
    )
    config = actor_config(
        aggregation,
        entropy_coeff=ENTROPY,
        use_kl_loss=True,
        kl_loss_coef=BETA,
        kl_loss_type=estimator,
    )
    output = {"log_probs": packed(leaf), "entropy": packed(batch["entropy"])}
    return ppo_loss(config, output, data)[0]


def main(inputs: str, outputs: str) -> None:
    torch.set_num_threads(1)
    with np.load(inputs) as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}
    results = {}
    for i in sorted({key.split("/")[0] for key in arrays}):
        keys = [key for key in arrays if key.startswith(f"{i}/")]
        batch = {key.split("/")[1]: arrays[key] for key in keys}
        coefficient = torch.tensor(with_kl(batch, "kl")[1], dtype=torch.float64)
        for name, value in {
            **advantages_of(batch),
            **losses_of(batch),
            "kl_coefficient": coefficient,
        }.items():
            results[f"{i}/{name}"] = value.numpy()
    np.savez(outputs, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
