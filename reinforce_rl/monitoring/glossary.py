"""Meaning of the metrics in `metrics.jsonl`: `METRICS` by full name, `metric_of` for a file's name.

`tools/config_docs.py --write` makes the tables of docs/metrics.md from `METRICS`. `CHARTS` has the
charts of the dashboard and the report. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reinforce_rl.algorithm.kl import KL_ESTIMATORS
from reinforce_rl.monitoring.progress import PHASES


@dataclass(frozen=True)
class Metric:
    name: str  # with its prefix; a word in capitals stands for any name
    unit: str  # empty for a plain number
    meaning: str
    look: str  # signs of good and bad values


_KL_ESTIMATES = "\n".join(
    f"kl_{name} | nats a response | {estimator.meaning} | {estimator.look}"
    for name, estimator in KL_ESTIMATORS.items()
)

# Prefixes, then a line per metric: name | unit | meaning | signs of good and bad values. An
# indented line continues the line before.
_GROUPS = {
    "train val test": """
rewards | reward | mean over the scored samples, as the source returned it | rises; flat: no signal
  (see train/reward_group_std) or lr too low; rises while val/rewards falls: overfitting
rewards_SOURCE | reward | mean reward of one of several sources, before its weight | a source that
  falls is traded for the others
reward_std | reward | standard deviation over all scored samples | 0: all samples earn the same
response_lengths | tokens | mean, with the end token | drifts slowly; grows to max_length, or falls
  to a few tokens: the reward pays for length
prompt_lengths | tokens | mean length of a prompt | follows from the data
fraction_of_samples_properly_ended | share | not cut at max_length | near 1; lower: raise
  max_length, or see truncated_samples
turns | answers | mean answers of an episode, with an environment | follows from the task; falls to
  1: the environment is not used any more
fraction_of_samples_scored | share | samples that the reward source scored | 1; lower: see the log
  of the reward source
fraction_of_samples_valid | share | scored, not empty, not dropped | 1, or less with
  truncated_samples=drop""",
    "train": f"""
rewards_with_kl | reward | shaped reward - beta * KL: the objective | rises; falls while rewards
  rise: KL costs more
reward_group_std | reward | mean standard deviation within a prompt's samples | above 0; 0: no
  signal
fraction_of_groups_with_zero_std | share | prompts whose samples all earn the same | low; high: see
  dynamic_filtering
init_policy_kl | nats a response | KL from the initial policy, by kl_estimator and kl_reduction |
  rises slowly; a jump, or tens of nats: lower lr or raise initial_policy_kl_penalty; read samples
{_KL_ESTIMATES}
kl_coefficient | reward per nat | beta of this step | constant, unless kl_target is set
baseline | reward | mean baseline of valid samples | follows rewards_with_kl
advantage_mean | reward | mean over the samples that train | near 0 with a baseline per group
advantage_std | reward | standard deviation over the samples that train | as reward_group_std; 0: no
  signal
advantage_magnitude | reward | mean absolute advantage of valid samples | as advantage_std
fraction_of_samples_trained | share | samples in the loss | near 1; low: filtered, truncated or
  unscored
actor_loss | | the loss, mean of the optimizer steps | finite; does not measure progress
grad_norm | | norm of the gradient before clipping, mean of the optimizer steps | steady; spikes:
  lower lr; 0: no signal
lr | | learning rate of the last optimizer step | follows model.optim.sched
skipped_step | 0 or 1 | an optimizer step was skipped because its gradient was not finite | 0; 1 now
  and then in bf16 is harmless; max_skipped_steps in a row end the run
optimizer_steps | steps | optimizer steps on this rollout batch | constant
clip_fraction | share | response tokens whose ratio was clipped | 0 on-policy; below 0.1 to 0.2
effective_sample_size | share | effective number of tokens under the importance weights, of all | 1
  on-policy; below 0.5: too far off-policy, fewer reinforce_epochs or larger global_batch_size
entropy | nats a token | entropy of the policy's distribution, with entropy_bonus | falls slowly;
  near 0: collapse
entropy_sampled | nats a token | mean of -log p of the sampled tokens, an estimate of entropy | as
  entropy
repetition | share | repeated trigrams of words, in up to 128 responses | low; rises with the
  reward: the reward pays for repetition
compression | share | size of these responses after zlib, each by itself | steady; short ones may
  exceed 1; falls: more repetition
length_reward_correlation | correlation | of a response's length and its reward, within groups |
  near 0; near 1: the reward pays for length
prompts_repeated | share | prompts on several lines of the data, or in validation | 0
unscored_length_auc | share | pairs of an unscored and a scored sample in which the unscored one is
  longer | near 0.5; near 1: long responses fail
generator_logprob_diff | nats a token | mean absolute difference between the log-probs of trainer
  and generator | below 0.05; higher: other weights, precision or sampling
generator_logprob_diff_median | nats a token | median over tokens | far below
  generator_logprob_diff: few tokens cause it
generator_logprob_diff_p99 | nats a token | 99th percentile over tokens | below 0.5
generator_logprob_diff_max | nats a token | maximum over tokens | below 5; the report shows that
  token
generator_logprob_diff_age_STEPS | nats a token | mean over tokens drawn with weights of this age in
  steps | grows with age
generator_kl | nats a token | k3 estimate of KL(generator, policy) | below 0.001; see
  generator_logprob_diff
generator_capped | share | tokens whose importance weight reached generator_ratio_cap | near 0
staleness | steps | mean age of the weights that drew the tokens (max_staleness) | at most
  max_staleness
dropped_groups | prompts | generated again because their rollouts were too old (rollout_order) |
  few; many: generators are too slow
generator_masked | share | tokens masked by a generator_correction ending in _mask | near 0; higher:
  see generator_logprob_diff
padding_fraction | share | padding in the update's micro-batches | low; high: set
  model.tokens_per_micro_batch
groups_drawn | prompts | drawn by dynamic_filtering | num_rollout_samples, or a multiple of it
groups_with_zero_std | prompts | of these, discarded because all samples earned the same | few of
  groups_drawn
groups_trained | prompts | of these, kept | num_rollout_samples; fewer: max_resampling_rounds was
  reached
resampling_rounds | rounds | rollout batches drawn besides the first | 0 or 1; each costs another
  generation
epoch | epochs | passes over the training prompts so far | rises
consumed_prompts | prompts | drawn so far | rises
loss | | reward model: loss on this batch | falls; far below val/loss: overfitting
accuracy | share | reward model: pairs in which chosen scores higher, ties half | rises from 0.5
margin | score | reward model: mean of chosen - rejected | rises""",
    "val": """
loss | | reward model: loss on held-out data | falls; patience ends a run in which it rises, and the
  best model is kept
accuracy | share | reward model: held-out pairs in which chosen scores higher, ties half | above
  length_baseline_accuracy
accuracy_standard_error | share | standard error of accuracy, over pairs | two models closer than
  twice this do not differ
length_baseline_accuracy | share | accuracy of "the longer answer wins" | below accuracy
calibration_error | share | expected calibration error of the predicted preference | below 0.05
margin | score | mean of chosen - rejected, held out | rises; grows much more than train/margin: not
  calibrated
score_mean | score | mean of all held-out scores | any
score_std | score | standard deviation of all held-out scores | above 0
mse_ATTRIBUTE | rating squared | reward model from ratings: mean squared error | falls
pearson_ATTRIBUTE | correlation | of predicted and given rating | towards 1
spearman_ATTRIBUTE | correlation | of their ranks | towards 1""",
    "timers": """
generate | s | rank 0 samples responses | steady; grows with the longest response
logprobs | s | log-probs under the policy | 0 if the generator's log-probs are used
init_logprobs | s | log-probs under the reference | about a third of train_time
reward_wait | s | time that rank 0 waits for scores | near 0; high: the reward is the bottleneck
train_time | s | the update | steady; steps with long responses take longer
send_weights | s | sends the new weights to generators on other ranks | steady; high: the network
  may be slow
record | s | what record=full adds to the critical path | far below 1 % of step_time
step_time | s | the whole step, without validation and checkpoint | steady; grows with
  response_lengths""",
    "memory": """
PHASE | 10^9 bytes | peak on rank 0, of the device or the resident set | steady; high: set
  model.tokens_per_micro_batch""",
    "timing": """
PHASE/max | s | work of the slowest rank, without waits for others | near the median
PHASE/median | s | work of the median rank | steady
PHASE/rank | rank | the slowest rank | changes; always the same one: look at its machine""",
    "alerts": """
RULE | 1 | the rule holds in this step; absent otherwise | absent; docs/monitoring.md has the
  rules""",
}


def _read(prefixes: str, text: str) -> dict[str, Metric]:
    rows = [re.split(r"\s*\|\s*", line) for line in re.sub(r"\n +", " ", text.strip()).split("\n")]
    return {
        f"{prefix}/{name}": Metric(f"{prefix}/{name}", *rest)
        for prefix in prefixes.split()
        for name, *rest in rows
    }


METRICS: dict[str, Metric] = {
    name: metric for group in _GROUPS.items() for name, metric in _read(*group).items()
}
_PHASE = "(generate|logprobs|init_logprobs|reward_wait|train_time|send_weights)"
_WORD = r"[\w.-]+"
_PATTERNS = {
    name: re.compile(
        re.sub("[A-Z]{4,}", lambda word: _PHASE if word[0] == "PHASE" else _WORD, name)
    )
    for name in METRICS
    if name != name.lower()
}


def metric_of(name: str) -> Metric | None:
    """Return the entry of a name in `metrics.jsonl`; None for an unknown name.

    `val/NAME/rewards` is the name of a metric of a named validation set.
    """
    if name in METRICS:
        return METRICS[name]
    metric = next(
        (METRICS[key] for key, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None
    )
    prefix, _, rest = name.partition("/")
    return metric or (
        metric_of(f"val/{rest.partition('/')[2]}") if prefix == "val" and "/" in rest else None
    )


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Mapping[str, str]  # name -> metric; the * of a pattern stands for the name
    unit: str = ""
    form: str = ""  # "percent" or "stacked"
    peaks: bool = False  # bins keep their largest value, so that spikes stay visible


_ENDED = "fraction_of_samples_properly_ended"
_NAMES = ("generation", "log-probs", "reference log-probs", "waiting for rewards", "update", "rest")
_PHASES = dict(zip(_NAMES, (*PHASES, "rest of the step"), strict=True))
CHARTS = (
    Chart(
        "Reward", {"training": "train/rewards", "validation": "val/rewards", "*": "val/*/rewards"}
    ),
    Chart("Reward by source", {"*": "train/rewards_*", "*, validation": "val/rewards_*"}),
    Chart("KL from the initial policy", {"training": "train/init_policy_kl"}, "nats a response"),
    Chart(
        "Response length",
        {"training": "train/response_lengths", "validation": "val/response_lengths"},
        "tokens",
    ),
    Chart(
        "Not truncated",
        {"training": f"train/{_ENDED}", "validation": f"val/{_ENDED}"},
        "share",
        "percent",
    ),
    Chart(
        "Loss",
        {"training": "train/actor_loss", "training, pairs": "train/loss", "held out": "val/loss"},
    ),
    Chart(
        "Pair accuracy",
        {"training": "train/accuracy", "held out": "val/accuracy"},
        "share",
        "percent",
    ),
    Chart("Calibration error", {"held out": "val/calibration_error"}),
    Chart("Correlation with held-out ratings", {"*": "val/pearson_*"}),
    Chart("Gradient norm", {"training": "train/grad_norm"}, peaks=True),
    Chart(
        "Step time by phase",
        {name: f"timers/{phase}" for name, phase in _PHASES.items()},
        "seconds",
        "stacked",
    ),
    Chart(
        "Peak memory by phase", {name: f"memory/{phase}" for name, phase in _PHASES.items()}, "GB"
    ),
    Chart("Entropy", {"training": "train/entropy"}, "nats a token"),
    Chart("Reward minus β KL", {"training": "train/rewards_with_kl"}),
    Chart("Learning rate", {"training": "train/lr"}),
)
