"""`reinforce-rl eval`: score models on the same prompts, and compare each with the first.

Every model goes through the trainer's own validation (`LocalRollouts.evaluate`), so the same
settings give the same mean reward. One model is in memory at a time. The reference comes last, and
computes the log-probs of all responses.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Prompt, RolloutBatch
from reinforce_rl.data.prompts import (
    DefaultBatchIterator,
    PromptLoader,
    RLHFDatasets,
    fixed_prompts,
)
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.evaluation.model import inference_config, load_actor
from reinforce_rl.evaluation.results import Comparison, ModelResult, Results
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers
from reinforce_rl.monitoring.metrics import reduce_metrics, validation_means
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import RolloutRow, Samples, sample_rows
from reinforce_rl.monitoring.run import RunMonitor, SilentMonitor
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.rewards.judge import Judge, preferences, question_of
from reinforce_rl.rewards.overrides import reward_overrides
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.episodes import play_episodes, started_environment
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.prompts import build_datasets, build_sampler
from reinforce_rl.rollout.source import RolloutContext
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.phases import StepClock
from reinforce_rl.runtime.status import RESULTS_FILE
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.statistics import WinRate


@dataclass
class _Answers:
    name: str
    model: str
    prompts: dict[int, Prompt]  # by id, of all ranks
    rows: list[RolloutRow]
    metrics: dict[str, float]
    local_batch: RolloutBatch  # of this rank


def evaluate(
    models: Sequence[str | Path],
    data: str | Path | None = None,
    *,
    rewards: Sequence[str] = (),
    reference: str | Path | None = None,
    judge: Judge | None = None,
    samples: int = 1,
    temperature: float | None = None,
    out: str | Path | None = None,
    like: str | Path | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    say: Callable[[str], object] = lambda text: None,
    start: Callable[[int, int], None] = lambda devices, nodes: None,
) -> Results:
    """Have models answer prompts, score the responses, and compare each model with the first.

    Args:
        models: Hugging Face folders, or folders of runs that have exported one.
        data: file of prompts; None for the validation set of `overrides` or `like`.
        rewards: names of functions (`gsm8k`, `my_rewards.cites`) and addresses of reward servers
            (`http://HOST:PORT/NAME`). Without any, also in `overrides` and `like`, nothing is
            scored.
        reference: model for an estimate of the KL of each model from it.
        judge: compares two responses.
        samples: of each prompt; one is greedy, several are drawn.
        temperature: temperature of drawn samples, 0 for greedy; None for the configuration's.
        out: folder for results.json and, in a folder a model, its samples and metrics.
        like: a run; its settings replace the defaults.
        overrides: KEY=VALUE of `train`.
        trust: use functions, addresses, interpreters and the like that only `like` names.
        say: called with a text about each of them before it is used.
        start: called with devices and nodes after the configuration was checked.

    Raises:
        ConfigError: a model, the data or a setting cannot be used.
        RewardServerError: a server gave no answer within its deadline.
    """
    if not models:
        sentence = "no model was given; expected folders of models or runs, before any KEY=VALUE"
        raise ConfigError([Fault(sentence, key="eval.model.none_given")])
    if samples < 1:
        sentence = f"samples is {samples}; expected 1 or more"
        raise ConfigError([Fault(sentence, key="eval.samples.out_of_range")])
    if temperature is not None and not 0 <= temperature < math.inf:
        sentence = (
            f"temperature is {temperature}; expected 0 for greedy, or a finite number above 0"
        )
        raise ConfigError([Fault(sentence, key="eval.temperature.out_of_range")])
    try:
        if judge is not None:
            judge.check()
    except ValueError as error:
        raise ConfigError([Fault(f"judge: {error}", key="eval.judge.invalid")]) from error
    options = [*reward_overrides(rewards, has_base=like is not None), *overrides]
    is_scored = like is not None or any(
        option.lstrip("+~").startswith(("reward", "remote_rm")) for option in options
    )

    def config(model: str | Path, name: str) -> TrainConfig:
        folder = None if out is None else Path(out) / name
        cfg = inference_config(
            model, options, data=data, like=like, folder=folder, trust=trust, say=say
        )
        if not any("max_failed_fraction" in option for option in options):
            cfg.trainer.reinforce.max_failed_fraction = 1.0  # the results count failed scores
        _set_sampling(cfg, samples, temperature)
        return cfg

    names = short_names([Path(model) for model in models])
    cfgs = {name: config(model, name) for name, model in zip(names, models, strict=True)}
    last = None if reference is None else config(reference, "reference")
    first = cfgs[names[0]]
    if first.model.data.data_prefix.validation is None:
        sentence = (
            "no prompts were given; give --data FILE, or --like RUN for the validation set of a run"
        )
        raise ConfigError([Fault(sentence, key="eval.prompts.none_given")])
    start(first.trainer.devices, first.trainer.num_nodes)
    datasets = _read_prompts(list(cfgs.values()), last)
    control = RunControl(out or ".", StopRequest())
    silence = first.trainer.heartbeat_timeout_seconds
    hang = first.trainer.collective_timeout_seconds
    with (
        configured_mesh(first) as mesh,
        control.watching(mesh, silence_seconds=silence, hang_seconds=hang),
    ):
        answers = [
            _answers(
                name,
                cfg,
                prompts,
                mesh,
                control,
                samples,
                is_scored=is_scored,
                with_log_probs=last is not None,
            )
            for (name, cfg), prompts in zip(cfgs.items(), datasets, strict=True)
        ]
        if last is not None:
            _add_kl(answers, last, mesh, control)
        results = Results([], [])
        with mesh.raise_on_all_ranks():
            if mesh.is_main:
                results = _results(answers, judge, is_scored=is_scored)
                if out is not None:
                    _write(Path(out), results, answers)
    return results


def short_names(models: Sequence[Path]) -> list[str]:
    """Return a short name for each model, all different."""
    short = [
        (model.resolve().parent if model.name == "hf" else model.resolve()).name for model in models
    ]
    return [
        f"{name}-{short[:i].count(name) + 1}" if name in short[:i] else name
        for i, name in enumerate(short)
    ]


def _set_sampling(cfg: TrainConfig, samples: int, temperature: float | None) -> None:
    sampling = cfg.model.reinforce.val_sampling_params
    if temperature is not None:
        sampling.use_greedy = temperature == 0
        sampling.temperature = temperature or 1.0
    elif samples > 1:
        sampling.use_greedy = False
    if samples > 1 and sampling.use_greedy:
        sentence = (
            f"samples is {samples}, but greedy samples of a prompt are all alike; ask for one "
            "sample, or set a temperature"
        )
        raise ConfigError([Fault(sentence, key="eval.samples.all_alike")])
    # Log-probs are computed at the temperature of the training samples.
    cfg.model.reinforce.sampling_params.temperature = sampling.temperature


def _read_prompts(cfgs: Sequence[TrainConfig], reference: TrainConfig | None) -> list[RLHFDatasets]:
    """Read the prompts with each model's tokenizer.

    Raises ConfigError if a model skips a prompt that another one answers, or if its tokenizer is
    not the reference's.
    """
    datasets = []
    faults = []
    info = None
    if reference is not None:
        info = TokenizerInfo.from_tokenizer(
            load_tokenizer(reference.pretrained_checkpoint.restore_from_path)
        )
    for cfg in cfgs:
        model = cfg.pretrained_checkpoint.restore_from_path
        tokenizer = load_tokenizer(model)
        datasets.append(build_datasets(cfg, tokenizer, splits=["validation"]))
        if info is not None and (
            differences := TokenizerInfo.from_tokenizer(tokenizer).differences(info)
        ):
            sentence = (
                f"the KL of {model} from the reference cannot be computed, as that needs the same "
                f"tokenizer for both: {differences[0]}"
            )
            faults.append(Fault(sentence, key="eval.reference.tokenizer_differs"))
        if datasets[-1].train.skipped and len(cfgs) > 1:
            sentence = (
                f"{model} has no room for {datasets[-1].train.skipped} of the prompts "
                "(model.data.too_long=skip), but all models must answer the same prompts; raise "
                "model.encoder_seq_length, or remove those prompts from the data"
            )
            faults.append(Fault(sentence, key="eval.prompts.no_room"))
    if faults:
        raise ConfigError(faults)
    return datasets


def _answers(
    name: str,
    cfg: TrainConfig,
    datasets: RLHFDatasets,
    mesh: Mesh,
    control: RunControl,
    samples: int,
    *,
    is_scored: bool,
    with_log_probs: bool,
) -> _Answers:
    rollout = cfg.model.reinforce
    folder = Path(cfg.exp_manager.explicit_log_dir)
    assert datasets.validation is not None
    (prompts,) = fixed_prompts(
        datasets.validation, rollout.num_val_samples, mesh.dp_rank, mesh.dp_size
    )
    progress = TrainingProgress(0, enabled=mesh.is_main)
    monitor = RunMonitor(folder, Loggers(), progress) if mesh.is_main else SilentMonitor(folder)
    model = cfg.pretrained_checkpoint.restore_from_path
    with contextlib.ExitStack() as stack:
        rm = None
        if is_scored:
            control.phases.begin("waiting for the reward server", has_deadline=True)
            rm = stack.enter_context(
                contextlib.closing(
                    connect_to_reward_servers(cfg, mesh, load_tokenizer(model), monitor)
                )
            )
        environment = stack.enter_context(started_environment(cfg, mesh))
        actor = stack.enter_context(_loaded(cfg, mesh, control, name))
        play_episodes(actor, environment, cfg)
        context = RolloutContext(
            cfg.trainer.reinforce,
            actor,
            rm,
            partial(
                DefaultBatchIterator,
                rollout.rollout_micro_batch_size,
                rollout.val_rollout_micro_batch_size,
            ),
            PromptLoader(
                datasets.train, build_sampler(cfg, datasets.train), mesh.dp_rank, mesh.dp_size
            ),
            StepClock(control.phases, mesh.device),
            control.stop,
        )
        rollouts = LocalRollouts(context)
        batch = rollouts.evaluate("evaluation", 0, prompts, control.phases, samples)
        if with_log_probs:
            batch = replace(batch, log_probs=actor.get_inference_log_probs(*batch.sequence_inputs))
    skips = actor.settings.reinforce.skip_special_tokens
    rows = sample_rows(
        0, prompts, batch, actor.tokenizer, set_name="validation", skip_special_tokens=skips
    )
    return _Answers(
        name=name,
        model=model,
        prompts={prompt.id: prompt for prompt in mesh.join_over_dp(list(prompts))},
        rows=mesh.join_over_dp(rows),
        metrics=reduce_metrics(validation_means(batch, prompts), mesh.gather_over_dp),
        local_batch=batch,
    )


@contextlib.contextmanager
def _loaded(
    cfg: TrainConfig, mesh: Mesh, control: RunControl, name: str
) -> Iterator[MegatronGPTReinforceActorModel]:
    control.phases.begin(f"loading {name}")
    gc.collect()  # frees the model before
    actor = load_actor(cfg, mesh)
    with contextlib.closing(actor.generator):
        yield actor


def _add_kl(
    all_answers: Sequence[_Answers], cfg: TrainConfig, mesh: Mesh, control: RunControl
) -> None:
    with _loaded(cfg, mesh, control, "the reference") as actor:
        for answers in all_answers:
            batch = answers.local_batch
            assert batch.log_probs is not None
            reference = actor.get_inference_log_probs(*batch.sequence_inputs)
            kl = mesh.join_over_dp(
                sequence_kl(batch.log_probs, reference, batch.response_mask).tolist()
            )
            answers.rows = [
                replace(row, kl=value) for row, value in zip(answers.rows, kl, strict=True)
            ]


def _results(all_answers: Sequence[_Answers], judge: Judge | None, *, is_scored: bool) -> Results:
    comparisons = []
    for answers in all_answers[1:]:
        if is_scored:
            comparisons.append(
                Comparison.by_reward(
                    answers.name, answers.rows, all_answers[0].name, all_answers[0].rows
                )
            )
        if judge is not None:
            comparisons.append(_judged(answers, all_answers[0], judge))
    models = [
        ModelResult.of(answers.name, answers.model, answers.rows, answers.metrics)
        for answers in all_answers
    ]
    return Results(models, comparisons)


def _judged(answers: _Answers, baseline: _Answers, judge: Judge) -> Comparison:
    """Have the judge compare the first samples of each prompt."""
    responses, baseline_responses = (
        {row.prompt_id: row.response for row in side.rows if row.sample_id == 0}
        for side in (answers, baseline)
    )
    questions = {
        id: question_of(prompt.text, {"messages": prompt.messages})
        for id, prompt in answers.prompts.items()
    }
    pairs = [(questions[id], responses[id], baseline_responses[id]) for id in responses]
    judged = preferences(judge, pairs)
    kept = [preference for preference in judged if not isinstance(preference, str)]
    wins = WinRate.of(kept, failed=len(judged) - len(kept))
    judgements = dict(zip(responses, judged, strict=True))
    return Comparison(
        answers.name, baseline.name, f"judge {judge.model}", wins, judgements=judgements
    )


def _write(out: Path, results: Results, all_answers: Sequence[_Answers]) -> None:
    """Write the results, and each model's samples and metrics in the files of a validation."""
    for answers in all_answers:
        folder = out / answers.name
        logger = JsonlLogger(folder / "metrics.jsonl", resume_step=0)
        monitor = RunMonitor(folder, Loggers([logger]), TrainingProgress(0, enabled=False))
        monitor.log_validation(0, answers.metrics, Samples(answers.rows))
        monitor.commit(0)
    write_atomically(
        out / RESULTS_FILE, json.dumps(results.as_json(), indent=2, allow_nan=False) + "\n"
    )
