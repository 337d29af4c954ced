"""One rank of the user's run on fake GPUs, in a process of its own: `python -m reinforce_rl.preflight.deep.rank`.

The device guard must be loaded before torch, so nothing here imports torch at its head. Cases come as lines of JSON on
stdin; each phase of each goes as a line of JSON to stdout, which the run's own output must not reach.

Notation: b sequences of a micro-batch, d layers of a stage, m micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from reinforce_rl.preflight.deep.cost import Cost
from reinforce_rl.preflight.deep.machine import Machine

if TYPE_CHECKING:
    from reinforce_rl.actor.model import MegatronGPTReinforceActorModel
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.rollout import RolloutBatch

DECODE_STEPS = 3  # of which the first, which may set things up, is not counted


@dataclass(frozen=True)
class Case:
    """What to measure.

    Attributes:
        config: of the run, as plain values.
        rank: of the job.
        layers: d, of every stage of the reduced model.
        in_flight: m of training whose memory is measured; costs at one more besides.
        train_rows, forward_rows: b with gradient and without.
        prompts, samples: of a generation call, and of each prompt.
        prompt_tokens, response_tokens: of every sequence.
        machine: whose rates time the kernels.
    """

    config: dict[str, Any]
    rank: int
    layers: int
    in_flight: int
    train_rows: int
    forward_rows: int
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    machine: Machine


def main() -> None:
    """Answer each line of stdin until it is closed."""
    out, sys.stdout = sys.stdout, sys.stderr
    phase = "start"
    for text in sys.stdin:
        raw = json.loads(text)
        case = Case(**{**raw, "machine": Machine(**raw["machine"])})

        def begin(name: str) -> None:
            nonlocal phase
            phase = name

        def put(name: str, cost: Cost, start: float, peak: float) -> None:
            traffic = [[*dataclasses.astuple(of), calls, cost.sent[of]] for of, calls in cost.calls.items()]
            _write(out, phase=name, start=start, peak=peak, counts=dict(cost.counts), traffic=traffic)

        try:
            from reinforce_rl.preflight.deep.meter import Meter  # loads the guard, and only then torch

            _measure(case, Meter(case.machine), begin, put)
            _write(out, done=True)
        except Exception as error:
            _write(out, fault=_told(error), phase=phase)
        gc.collect()  # of the model, which holds itself in circles


def _write(out: IO[str], **values: Any) -> None:
    print(json.dumps(values), file=out, flush=True)


def _told(error: BaseException) -> str:
    """The error, and the lines of this package and of megatron that led to it."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "reinforce_rl" in f.filename or "megatron" in f.filename
    ]
    where = " < ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in reversed(frames[-4:]))
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}; at {where or 'an unknown line'}"


def _measure(case: Case, meter: Any, begin: Callable[[str], None], put: Callable[..., None]) -> None:
    from omegaconf import OmegaConf

    from reinforce_rl.build import optimizer_settings
    from reinforce_rl.build_actor import build_actor
    from reinforce_rl.config import TrainConfig
    from reinforce_rl.config_reading import build
    from reinforce_rl.megatron.architecture import Architecture
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
    from reinforce_rl.tokenizer import load_tokenizer

    cfg = build(TrainConfig, OmegaConf.create(case.config), "", [])
    model = cfg.model
    folder = cfg.pretrained_checkpoint.restore_from_path
    architecture = Architecture.from_folder(folder)
    architecture = dataclasses.replace(architecture, num_layers=case.layers * model.pipeline_model_parallel_size)
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    world, local = cfg.trainer.world_size, case.rank % cfg.trainer.devices
    os.environ.update(RANK=str(case.rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local))
    with meter.fake(), parallel_mesh(*sizes, sequence_parallel=model.sequence_parallel, seed=model.seed) as mesh:

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            begin(name.split()[0])
            with meter.counting(mesh, cfg.trainer.devices) as found:
                yield
            put(name, found.cost, found.start, found.peak)

        tokenizer = load_tokenizer(folder)
        with phase("start"):
            actor = build_actor(cfg, mesh, tokenizer, architecture=architecture)
            optimizer = ActorOptimizer(*build_optimizer(actor.ddp, optimizer_settings(cfg, updates=10)))
        optimizer.step()  # makes Adam's moments
        offloads = model.reinforce.offload_adam_states
        with optimizer.offloaded() if offloads else contextlib.nullcontext():
            with phase("resident"):
                pass
            if case.prompts:
                _generate(case, actor, mesh, begin, put, meter, cfg.trainer.devices)
        length = case.prompt_tokens + case.response_tokens
        for name, passes in (
            ("logprobs", actor.get_inference_log_probs),
            ("init_logprobs", actor.get_init_policy_logprobs),
        ):
            if name == "init_logprobs" and not cfg.trainer.reinforce.initial_policy_kl_penalty > 0:
                continue
            for count in (1, 2):
                batch = _rollouts(case, count * case.forward_rows)
                meter.hands_over(actor, case.forward_rows, length)
                with phase(f"{name} {count}"):
                    passes(batch.sequences, batch.prompt_lengths, batch.response_lengths, batch.group_ids)
        for count in (case.in_flight, case.in_flight + 1):
            _train(case, count, actor, phase, meter)
        with phase("optimizer"):
            optimizer.step()
        if offloads:
            with meter.counting(mesh, cfg.trainer.devices) as found, optimizer.offloaded():
                inside = meter.bytes
            put("offload", found.cost, found.start, inside)


class _Enough(Exception):
    """As many decode steps as are looked at."""


def _generate(
    case: Case,
    actor: MegatronGPTReinforceActorModel,
    mesh: Mesh,
    begin: Callable[[str], None],
    put: Callable[..., None],
    meter: Any,
    devices: int,
) -> None:
    """One call, left after a few decode steps: what each pass through the model and what follows it cost."""
    from reinforce_rl.rollout import Prompt

    begin("generation")
    prompts = [Prompt(i, "", (3,) * case.prompt_tokens) for i in range(case.prompts)]
    params = dataclasses.replace(actor.settings.sampling, max_length=case.response_tokens)
    seen: list[tuple[int, Cost]] = []

    def before(module: Any, args: tuple[Any, ...]) -> None:
        seen.append((args[0].shape[1], meter.so_far()))
        if sum(width == 1 for width, _ in seen) > DECODE_STEPS:
            raise _Enough

    hook = actor.lm.register_forward_pre_hook(before)
    try:
        with meter.counting(mesh, devices) as found, contextlib.suppress(_Enough):
            actor.generator.generate(prompts, case.samples, params, 1)
    finally:
        hook.remove()
    steps = [cost for width, cost in seen if width == 1] + ([] if len(seen) > DECODE_STEPS else [found.cost])
    put("prefill", steps[0], found.start, found.peak)
    put("decode", (steps[-1] + steps[1] * -1) * (1 / (len(steps) - 2)), found.start, found.peak)


def _rollouts(case: Case, count: int) -> RolloutBatch:
    """Sequences of full length, prompts in groups."""
    import torch

    from reinforce_rl.rollout import FINISH_LENGTH, RolloutBatch

    zero = torch.zeros((count, case.response_tokens))
    number = torch.arange(count)
    return RolloutBatch(
        sequences=torch.full((count, case.prompt_tokens + case.response_tokens), 3),
        prompt_lengths=torch.full((count,), case.prompt_tokens),
        response_lengths=torch.full((count,), case.response_tokens),
        group_ids=number // case.samples,
        sample_ids=number % case.samples,
        finish_reasons=(FINISH_LENGTH,) * count,
        rewards=zero[:, 0],
        valid=torch.ones(count, dtype=torch.bool),
        generator_log_probs=zero,
        log_probs=zero,
        init_log_probs=zero,
    )


def _train(case: Case, count: int, actor: MegatronGPTReinforceActorModel, phase: Any, meter: Any) -> None:
    from reinforce_rl.algorithms.loss import Denominators
    from reinforce_rl.rollout import ReinforceBatch

    rollouts = _rollouts(case, count * case.train_rows)
    none = rollouts.rewards
    batch = ReinforceBatch(rollouts, none, none, none, rollouts.response_mask.float(), rollouts.valid)
    meter.hands_over(actor, case.train_rows, case.prompt_tokens + case.response_tokens)
    with phase(f"training {count}"):
        actor.get_loss_and_metrics(batch, Denominators(1.0, 1.0, 1.0))


if __name__ == "__main__":
    main()
