"""Drive the process that runs single ranks on fake GPUs, and choose the ranks that stand for all."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import rank_at
from reinforce_rl.errors import ReinforceError
from reinforce_rl.preflight.deep.machine import Cost, Hardware, Traffic, total
from reinforce_rl.preflight.deep.rank import Case
from reinforce_rl.preflight.deep.step import PredictedJob, Role

Phases = dict[str, tuple[Cost, float]]  # costs and bytes
SMALLEST_DEPTH = 2  # layers per stage; twice it is measured as well


class DeepFault(ReinforceError):
    """The run would fail. The message names the rank, the phase and the lines."""


class Worker:
    """Context manager that runs cases in turn; `tell` gets a line per measurement."""

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

    def measure(self, job: PredictedJob) -> list[Role]:
        """Return the costs of the representative ranks at full depth.

        Raises:
            DeepFault: one of them failed.
        """
        longest = job.lengths.longest
        average = min(math.ceil(job.lengths.average), longest)
        runs = {
            (response, stage): [self._run(job, stage, d, response) for d in depths_of(job.cfg, job.layers[stage])]
            for response in dict.fromkeys((longest, average))
            for stage, _ in roles(job)
        }
        return [
            _at_depth(job, stage, stages, runs[longest, stage], runs[average, stage]) for stage, stages in roles(job)
        ]

    def _run(self, job: PredictedJob, stage: int, depth: int, response: int) -> Phases:
        plan, layout, layers = job.batches, job.layout, job.layers[stage]
        config = job.cfg.model_copy(update={"generation": "native", "preflight": False}).model_dump()
        model = config["model"]
        # Uneven stages are measured one by one, as if all had the same size.
        overrides = job.cfg.model.megatron_overrides
        model["megatron_overrides"] = {k: v for k, v in overrides.items() if "pipeline_stage" not in k}
        recomputed = model["activations_checkpoint_num_layers"]
        if model["activations_checkpoint_method"] == "block":
            model["activations_checkpoint_num_layers"] = max(1, min(recomputed, layers) * depth // layers)
        train_rows, forward_rows = job.rows(response)
        case = Case(
            config=config,
            rank=rank_at(0, 0, 0, stage, (layout.tensor, layout.context, layout.data, layout.pipeline)),
            layers=depth,
            in_flight=min(layout.pipeline - stage, plan.micro_batches),
            train_rows=train_rows,
            forward_rows=forward_rows,
            prompts=0 if job.has_engine else job.prompts_of_call,
            samples=plan.samples,
            prompt_tokens=plan.longest_prompt,
            response_tokens=response,
            machine=job.machine,
        )
        role = f"rank {case.rank} (stage {stage} of {layout.pipeline})"
        self._tell(f"{role}: {depth} of {layers} layers, {plan.longest_prompt + response} tokens")
        return self._answers(json.dumps(dataclasses.asdict(case), default=Hardware.model_dump), role)

    def _answers(self, case: str, role: str) -> Phases:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        found: Phases = {}
        try:
            stdin.write(case + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its output below says why
        while text := stdout.readline():
            answer = json.loads(text)
            if "fault" in answer:
                raise DeepFault(f"{role} fails in {answer['phase']}: {answer['fault']}")
            if "done" in answer:
                return found
            rows = [(Traffic(*row[:4]), *row[4:]) for row in answer["traffic"]]
            cost = Cost(answer["counts"], {of: calls for of, calls, _ in rows}, {of: sent for of, _, sent in rows})
            found[answer["phase"]] = (cost, answer["bytes"])
        self._said.seek(0)
        said = self._said.read().strip().splitlines()[-3:]
        raise DeepFault(f"the process with the fake GPU ended: {' | '.join(said) or 'it said nothing'}")


def _at_depth(job: PredictedJob, stage: int, stages: int, full: Sequence[Phases], usual: Sequence[Phases]) -> Role:
    # Extrapolate linearly in depth: costs at the average length, peaks at the longest.
    layers, depths = job.layers[stage], depths_of(job.cfg, job.layers[stage])
    share = 0.0 if len(depths) == 1 else (layers - depths[0]) / (depths[1] - depths[0])
    costs = {name: total([(1 - share, cost), (share, usual[-1][name][0])]) for name, (cost, _) in usual[0].items()}
    peaks = {name: (1 - share) * peak + share * full[-1][name][1] for name, (_, peak) in full[0].items()}
    return Role(stage, stages, costs, _by_phase(peaks))


def _by_phase(peaks: dict[str, float]) -> dict[str, float]:
    found = {"resident": 0.0, "away": 0.0}
    for name, peak in peaks.items():
        title = {"prefill": "generation", "decode": "generation"}.get(name, name.removesuffix(" once"))
        if not title.endswith(" each"):  # measured with one more micro-batch than there may be
            found[title] = max(found.get(title, 0.0), peak)
    return found


def roles(job: PredictedJob) -> list[tuple[int, int]]:
    """Return (stage, number of stages like it) of the first, the last, and the middle stage with most layers."""
    last = job.layout.pipeline - 1
    between = range(1, last)
    middle = [(max(between, key=lambda stage: job.layers[stage]), len(between))] if between else []
    return [(0, 1), *middle, *([(last, 1)] if last else [])]


def depths_of(cfg: TrainConfig, layers: int) -> tuple[int, ...]:
    """Return the layers per stage to measure: two depths for a linear fit, or all if they are few."""
    # Recomputed layers keep their share of a stage.
    number, unit = cfg.model.activations_checkpoint_num_layers or 1, 1
    if cfg.model.activations_checkpoint_method == "uniform":
        unit = number
    elif cfg.model.activations_checkpoint_method == "block" and number < layers:
        unit = layers // math.gcd(layers, number)
    least = unit * -(-SMALLEST_DEPTH // unit)
    return (least, 2 * least) if 2 * least < layers else (layers,)
