"""Measure single ranks of a run on fake GPUs, in the process of a `ModuleChild`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.preflight.fake_gpu import install, is_of_fake
from reinforce_rl.utils.process import connect_to_parent

if TYPE_CHECKING:
    from helpers.fake_cuda.machine import Machine
    from helpers.fake_cuda.mode import Ledger

    from reinforce_rl.data.batches import RolloutBatch
    from reinforce_rl.megatron.optimizer import ActorOptimizer
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

# No torch import at module level: the device guard must be loaded first.

DECODE_STEPS = 3  # the first may have a setup cost and is not counted


class Traffic(NamedTuple):
    """A kind of collective; `group` is its parallelism (tensor, data, ...)."""

    group: str
    kind: str
    ranks: int
    nodes: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{self.kind} of {self.ranks} ranks ({self.group}) on {nodes}"


@dataclass(frozen=True)
class Cost:
    # Kernels, launches by the host, waits of the host ("syncs"), and FLOPs of matrix products, in
    # all and in fp32. For a decoded token also its share of a pass over the rows ("passes").
    counts: dict[str, float] = field(default_factory=dict)
    calls: dict[Traffic, float] = field(default_factory=dict)  # calls of each collective
    sent: dict[Traffic, float] = field(default_factory=dict)  # bytes of its tensors

    def __getitem__(self, name: str) -> float:
        return self.counts.get(name, 0.0)


Phases = dict[str, tuple[Cost, float]]  # cost and peak bytes by phase


def total(parts: Iterable[tuple[float, Cost]]) -> Cost:
    whole = Cost()
    for weight, cost in parts:
        for name in ("counts", "calls", "sent"):
            sums = getattr(whole, name)
            for key, value in getattr(cost, name).items():
                sums[key] = sums.get(key, 0.0) + weight * value
    return whole


@dataclass(frozen=True)
class Case:
    config: TrainConfig  # of the run
    rank: int  # of the job
    layers: int  # per stage of the reduced model
    in_flight: int  # training micro-batches for the peak; costs also use one more
    train_rows: int  # sequences of a training micro-batch
    forward_rows: int  # sequences of a forward micro-batch
    prompts: int  # per generation call; 0 if an engine generates
    samples: int  # per prompt
    prompt_tokens: int  # per sequence
    response_tokens: int


def main() -> None:
    """Measure each case that the parent sends; answer with its phases or a fault."""
    connection = connect_to_parent()
    with contextlib.suppress(EOFError):
        while True:
            connection.send(answer(connection.recv()))
            gc.collect()  # the model has reference cycles


def answer(case: Case) -> Phases | str:
    """Return the costs and peaks of a case, or the phase and source lines of an error."""
    rank = RankRun(case)
    try:
        return rank.measure(install())
    except Exception as error:
        return f"{rank.phase}: {_summary(error)}"


def _summary(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_of_fake(f.filename)]
    frames = [f for f in frames if "/reinforce_rl/" in f.filename or "/megatron/" in f.filename]
    where = " < ".join(
        f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in reversed(frames[-4:])
    )
    notes = " ".join(getattr(error, "__notes__", []))
    message = " ".join(f"{error} {notes}".split())[:400]
    return f"{type(error).__name__}: {message}; at {where or 'an unknown line'}"


class _Enough(Exception):
    """Enough decode steps were measured."""


class RankRun:
    def __init__(self, case: Case):
        self._case = case
        self._phases = Phases()
        self.phase = "start"

    def measure(self, fake: Machine) -> Phases:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        from reinforce_rl.data.tokenizer import load_tokenizer
        from reinforce_rl.megatron.architecture import Architecture
        from reinforce_rl.megatron.mesh import World, parallel_mesh
        from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
        from reinforce_rl.policy.build import build_actor

        case = self._case
        cfg = self._case.config
        model = self._case.config.model
        self._gpu = fake.gpu
        folder = cfg.pretrained_checkpoint.restore_from_path
        stages = model.pipeline_model_parallel_size
        architecture = dataclasses.replace(
            Architecture.from_folder(folder), num_layers=case.layers * stages
        )
        sizes = (model.tensor_model_parallel_size, stages, model.context_parallel_size)
        # The other ranks are fake, too.
        world = World(case.rank, cfg.trainer.world_size, HashStore())
        with (
            fake.rank(case.rank, cfg.trainer.world_size),
            parallel_mesh(
                *sizes,
                sequence_parallel=model.sequence_parallel,
                seed=model.seed,
                world=world,
            ) as self._mesh,
        ):

            def made() -> tuple[MegatronGPTReinforceActorModel, ActorOptimizer]:
                actor = build_actor(
                    cfg, self._mesh, load_tokenizer(folder), architecture=architecture
                )
                clip_grad = cfg.trainer.reinforce.gradient_clip_val
                built = build_optimizer(actor.ddp, model.optim, clip_grad=clip_grad, total_steps=10)
                return actor, ActorOptimizer(*built, actor.ddp)

            actor, optimizer = self._put("start", made)
            optimizer.step()  # allocates Adam's moments
            self._away(optimizer, actor, offloads=model.reinforce.offload_adam_states)
            self._passes(
                "log-probs", 1, lambda count: self._log_probs(actor.get_inference_log_probs, count)
            )
            if cfg.uses_reference:
                reference = actor.get_init_policy_logprobs
                self._passes(
                    "reference log-probs", 1, lambda count: self._log_probs(reference, count)
                )
            self._passes("training", case.in_flight, lambda count: self._train(actor, count))
            self.phase = "optimizer"
            self._put(self.phase, optimizer.step)
        return self._phases

    def _put(self, name: str, action: Callable[[], Any]) -> Any:
        with self._gpu.counting() as ledger:
            done = action()
        self._phases[name] = self._cost(ledger), ledger.peak
        return done

    def _passes(self, name: str, first: int, run: Callable[[int], object]) -> None:
        # Split the cost into fixed and per micro-batch, by two runs; the peak is the smaller run's.
        self.phase = name
        for count in (first, first + 1):
            self._put(f"{name} {count}", functools.partial(run, count))
        (low, peak), (high, _) = (
            self._phases.pop(f"{name} {count}") for count in (first, first + 1)
        )
        each = total([(1, high), (-1, low)])
        self._phases[f"{name} once"] = total([(1, low), (-first, each)]), peak
        self._phases[f"{name} each"] = each, peak

    def _cost(self, ledger: Ledger) -> Cost:
        fp32_flops = 0.0
        for kernel, count in ledger.kernels.items():
            if not kernel.low_precision:
                fp32_flops += count * kernel.flops
        calls: Counter[Traffic] = Counter()
        sent: Counter[Traffic] = Counter()
        for call in ledger.collectives:
            nodes = len({rank // self._case.config.trainer.devices for rank in call.ranks})
            of = Traffic(self._group(call.ranks), call.kind, len(call.ranks), nodes)
            calls[of] += 1
            sent[of] += call.bytes
        counts = {
            "kernels": ledger.num_kernels,
            "launches": ledger.launches,
            "syncs": ledger.num_syncs,
            "flops": ledger.flops,
            "fp32_flops": fp32_flops,
        }
        return Cost(counts, dict(calls), dict(sent))

    def _group(self, ranks: tuple[int, ...]) -> str:
        # Name the parallelism of a group; "several" if no single one fits.
        layout = self._mesh.layout
        step = 1
        for name in ("tensor", "context", "data", "pipeline"):
            # `step` is the distance between the ranks of neighbours.
            size = getattr(layout, name)
            if len(ranks) <= size and abs(ranks[1] - ranks[0]) == step:
                return name
            step *= size
        return "all" if len(ranks) == self._mesh.world_size else "several"

    def _away(
        self, optimizer: ActorOptimizer, actor: MegatronGPTReinforceActorModel, *, offloads: bool
    ) -> None:
        before = self._gpu.memory.bytes
        buffers: Any = actor.ddp.buffers
        gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
        with optimizer.offloaded() if offloads else contextlib.nullcontext():
            resident = self._gpu.memory.bytes
            self._phases["resident"] = Cost(), resident
            # Gradients are freed instead of moved.
            self._phases["away"] = Cost(), before - resident - gradients if offloads else 0
            if self._case.prompts:
                self._generate(actor)

    def _generate(self, actor: MegatronGPTReinforceActorModel) -> None:
        """Measure the cost of a prompt and of a decoded token."""
        from reinforce_rl.data.batches import Prompt
        from reinforce_rl.preflight.memory import Decoding

        case = self._case
        self.phase = "generation"
        prompts = [Prompt(i, "", (3,) * case.prompt_tokens) for i in range(case.prompts)]
        params = dataclasses.replace(actor.sampling, max_length=case.response_tokens)
        schedule = Decoding(
            case.prompts,
            case.samples,
            case.prompt_tokens,
            case.response_tokens,
            case.config.model.reinforce.generation_cache_tokens,
        ).schedule()
        steps: list[Cost] = []  # cumulative cost before each decode step
        rows = 1  # of a decode step, padding included

        def before(module: Any, args: tuple[Any, ...]) -> None:
            nonlocal rows
            if args[0].shape[1] == 1:
                steps.append(self._cost(self._gpu.ledger))
                rows = args[0].shape[0]
            if len(steps) > DECODE_STEPS:
                raise _Enough

        hook = actor.lm.register_forward_pre_hook(before)
        try:
            with self._gpu.counting() as ledger, contextlib.suppress(_Enough):
                actor.generator.generate(prompts, case.samples, params, 1)
        finally:
            hook.remove()
        if len(steps) <= DECODE_STEPS:
            steps.append(self._cost(ledger))
        # Costs are cumulative: a decode step is the slope after the first one, if there is a
        # second.
        first = steps[min(1, max(len(steps) - 2, 0))]
        tokens = rows * max(len(steps) - 2, 1)
        decode = total([(1 / tokens, steps[-1]), (-1 / tokens, first)])
        decode.counts["passes"] = 1 / rows
        self._phases["prefill"] = total([(1 / schedule.slots, steps[0])]), ledger.peak
        self._phases["decode"] = decode, ledger.peak

    def _log_probs(self, passes: Callable[..., Any], count: int) -> None:
        rollouts = self._rollouts(count * self._case.forward_rows)
        passes(*rollouts.sequence_inputs)

    def _train(self, actor: MegatronGPTReinforceActorModel, count: int) -> None:
        from reinforce_rl.algorithm.loss import Denominators
        from reinforce_rl.data.batches import ReinforceBatch

        rollouts = self._rollouts(count * self._case.train_rows)
        none = rollouts.rewards
        batch = ReinforceBatch(
            rollouts, none, none, none, rollouts.response_mask.float(), rollouts.valid
        )
        actor.get_loss_and_metrics(batch, Denominators(1.0, 1.0, 1.0))

    def _rollouts(self, count: int) -> RolloutBatch:
        import torch

        from reinforce_rl.data.batches import RolloutBatch
        from reinforce_rl.data.finish_reasons import FINISH_LENGTH

        case = self._case
        number = torch.arange(count)
        zeros = torch.zeros((count, case.response_tokens))
        return RolloutBatch(
            sequences=torch.full((count, case.prompt_tokens + case.response_tokens), 3),
            prompt_lengths=torch.full((count,), case.prompt_tokens),
            response_lengths=torch.full((count,), case.response_tokens),
            group_ids=number // case.samples,
            sample_ids=number % case.samples,
            finish_reasons=(FINISH_LENGTH,) * count,
            rewards=zeros[:, 0],
            valid=torch.ones(count, dtype=torch.bool),
            generator_log_probs=zeros,
            log_probs=zeros,
            init_log_probs=zeros,
        )


if __name__ == "__main__":
    # The parent unpickles classes of this module, not of `__main__`.
    importlib.import_module("reinforce_rl.preflight.rank").main()
