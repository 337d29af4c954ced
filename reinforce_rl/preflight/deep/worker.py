"""The process that runs single ranks on fake GPUs, and which ranks stand for all."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from reinforce_rl.config import TrainConfig
from reinforce_rl.errors import ReinforceError
from reinforce_rl.layout import rank_at
from reinforce_rl.preflight.deep.cost import Cost, Traffic, line
from reinforce_rl.preflight.deep.rank import Case
from reinforce_rl.preflight.deep.step import Job, Measured, RoleCosts

SMALLEST_DEPTH = 2  # layers a stage; the other depth that is measured is twice it


class DeepFault(ReinforceError):
    """The run would end with an error. The text names the rank, the phase and the lines."""


class Worker:
    """Runs cases one after another. A context manager.

    Args:
        tell: called with a line about what is being measured.
    """

    def __init__(self, tell: Callable[[str], object]):
        self._tell = tell
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on leaving)

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "reinforce_rl.preflight.deep.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def measure(self, job: Job) -> list[RoleCosts]:
        """What the ranks cost that stand for all others, at full depth.

        Raises:
            DeepFault: one of them failed.
        """
        return [self._role(job, *role) for role in roles(job)]

    def _role(self, job: Job, stage: int, stages: int) -> RoleCosts:
        depths = depths_of(job.cfg, job.layers[stage])
        in_flight = min(job.layout.pipeline - stage, job.batches.micro_batches)
        full = [self._run(job, stage, depth, in_flight, job.lengths.longest) for depth in depths]
        usual, average = full, math.ceil(job.lengths.average)
        if average < job.lengths.longest:
            usual = [self._run(job, stage, depth, in_flight, average) for depth in depths]
        layers, ends = job.layers[stage], (depths[0], depths[-1])

        def at(of: Callable[[Measured], float], low: Measured, high: Measured) -> float:
            share = 0.0 if ends[0] == ends[1] else (layers - ends[0]) / (ends[1] - ends[0])
            return of(low) + share * (of(high) - of(low))

        def peak(measured: Measured) -> float:
            return measured.peak

        peaks = {}
        for name in full[0]:
            title = _TITLES.get(name.split()[0])
            if title and name != f"training {in_flight + 1}":  # may have one more in flight than there are
                peaks[title] = max(peaks.get(title, 0.0), at(peak, full[0][name], full[-1][name]))
        peaks["resident"] = at(lambda m: m.start, full[0]["resident"], full[-1]["resident"])
        phases = {
            name: Measured(
                line(layers, *ends, low.cost, usual[-1][name].cost),
                at(lambda m: m.start, low, usual[-1][name]),
                at(peak, low, usual[-1][name]),
            )
            for name, low in usual[0].items()
        }
        return RoleCosts(stage, stages, in_flight, phases, peaks)

    def _run(self, job: Job, stage: int, depth: int, in_flight: int, response: int) -> dict[str, Measured]:
        plan, layout, cfg = job.batches, job.layout, job.cfg
        sizes = (layout.tensor, layout.context, layout.data, layout.pipeline)
        native = cfg.generation == "native"
        config = dataclasses.asdict(dataclasses.replace(cfg, generation="native", preflight=False))
        overrides, options = cfg.model.megatron_overrides, config["model"]
        options["megatron_overrides"] = {k: v for k, v in overrides.items() if "pipeline_stage" not in k}
        block = options["activations_checkpoint_num_layers"]
        if options["activations_checkpoint_method"] == "block" and depth < job.layers[stage]:
            options["activations_checkpoint_num_layers"] = max(1, block * depth // job.layers[stage])
        sequences = plan.prompts_of_rank.most * plan.samples
        length = plan.longest_prompt + response
        case = Case(
            config=config,
            rank=rank_at(0, 0, 0, stage, sizes),
            layers=depth,
            in_flight=in_flight,
            train_rows=_rows(cfg, cfg.model.micro_batch_size, plan.prompts_of_update.most * plan.samples, length),
            forward_rows=_rows(cfg, cfg.model.reinforce.forward_micro_batch_size, sequences, length),
            prompts=job.prompts_of_call if native else 0,
            samples=plan.samples,
            prompt_tokens=plan.longest_prompt,
            response_tokens=response,
            machine=job.machine,
        )
        role = f"rank {case.rank} (stage {stage} of {layout.pipeline})"
        self._tell(f"{role}, {depth} of {job.layers[stage]} layers, {length} tokens")
        return self._answers(json.dumps(dataclasses.asdict(case)), role)

    def _answers(self, case: str, role: str) -> dict[str, Measured]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        try:
            stdin.write(case + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass
        found: dict[str, Measured] = {}
        while text := stdout.readline():
            answer = json.loads(text)
            if "fault" in answer:
                raise DeepFault(f"{role} fails in {answer['phase']}: {answer['fault']}")
            if "done" in answer:
                return found
            found[answer["phase"]] = _measured(answer)
        self._said.seek(0)
        said = self._said.read().strip().splitlines()[-3:]
        raise DeepFault(f"the process with the fake GPU ended: {' | '.join(said) or 'it said nothing'}")


_TITLES = {
    "start": "start",
    "prefill": "generation",
    "logprobs": "log-probs",
    "init_logprobs": "reference log-probs",
    "training": "training",
    "optimizer": "optimizer",
}


def roles(job: Job) -> list[tuple[int, int]]:
    """Stages whose ranks stand for all: the first, the last, and of those between the one with most layers.

    Returns:
        number of the stage, and stages that are like it.
    """
    last = job.layout.pipeline - 1
    between = range(1, last)
    chosen = [(0, 1)]
    if between:
        chosen.append((max(between, key=lambda stage: job.layers[stage]), len(between)))
    return chosen + ([(last, 1)] if last else [])


def depths_of(cfg: TrainConfig, layers: int) -> tuple[int, ...]:
    """Layers of a stage that are measured: two depths that costs follow a line through, or all where they are few.

    Recomputed layers keep their share of a stage.
    """
    number, unit = cfg.model.activations_checkpoint_num_layers or 1, 1
    if cfg.model.activations_checkpoint_method == "uniform":
        unit = number
    elif cfg.model.activations_checkpoint_method == "block" and number < layers:
        unit = layers // math.gcd(layers, number)
    least = unit * -(-SMALLEST_DEPTH // unit)
    return (least, 2 * least) if 2 * least < layers else (layers,)


def _rows(cfg: TrainConfig, size: int, sequences: int, length: int) -> int:
    most = cfg.model.tokens_per_micro_batch
    return min(sequences, size if most is None else max(most // length, 1))


def _measured(answer: dict[str, Any]) -> Measured:
    traffic: Sequence[list[Any]] = answer["traffic"]
    calls = {Traffic(*row[:4]): row[4] for row in traffic}
    sent = {Traffic(*row[:4]): row[5] for row in traffic}
    return Measured(Cost(answer["counts"], calls, sent), answer["start"], answer["peak"])
