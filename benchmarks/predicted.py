"""Predicted seconds of a step beside published ones: what `preflight=deep` is worth.

python benchmarks/predicted.py                  (about 10 minutes on one core; no GPU, no weights)
python benchmarks/predicted.py --only "NeMo-RL 8B"

The published systems are others than this one. What is taken from each is its layout, batch and lengths; passes and
updates are this project's own on fake GPUs at that layout, and generation is the model of an engine with the
published batch. `ASSUMED` says what no source tells. No constant is fitted to these numbers, but not all were blind: a
first run, with 0.8 of the bandwidth for decoding and no waiting for the slowest engine, was off by -40 to -59 %; only
then did `decode_share` come from published inference latencies, and the waiting into the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from rich.table import Table  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from reinforce_rl.config.compose import compose  # noqa: E402
from reinforce_rl.config.load import load_config  # noqa: E402
from reinforce_rl.preflight.deep import Worker, job_of  # noqa: E402
from reinforce_rl.preflight.plan import read_inputs  # noqa: E402
from reinforce_rl.preflight.report import print_step  # noqa: E402
from reinforce_rl.preflight.step import MACHINES, Engine, Lengths, PhaseTime, PredictedJob, predict  # noqa: E402
from reinforce_rl.utils.console import Console  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
ASSUMED = """
NeMo-Aligner 70B (docs/user-guide/rlhf.rst, "PPO Performance Results with TensorRT-LLM"): PPO on HelpSteer2 prompts,
1,024 rollouts, 128 sequences an optimizer step, mean responses as listed, rollout_micro_batch_size 8 (16 on 64 nodes).
TP8 PP8 micro-batch 1 from the model_config.yaml of nvidia/Llama3-70B-PPO-Chat, which was trained so; "reshard": each
node decodes by itself, TP8.
Assumed: prompts of 1,024 tokens, max_length 1,024, passes padded to 2,048 tokens (the tutorial's max_length
and pad_to_length), exponential lengths, sequence parallelism, Adam's states offloaded (the default there). The critic
and the reward model on nodes of their own are taken to be hidden. A batch of 8 waits for its longest response.
NeMo-RL 8B (docs/about/performance-summary.md, v0.4, and examples/configs/recipes/llm/performance/
grpo-llama3.1-8b-instruct-2n8g.yaml with grpo_math_1B.yaml): 64 prompts x 32, 512 sequences an optimizer step, PP2,
full recomputation, passes packed to 4,096 tokens, distributed optimizer with overlap, an engine of one GPU each with
all its 128 sequences at once; mean sequence 1,060. Assumed: prompts of 120 tokens, exponential response lengths.
"""


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
        seconds: of it.
        model: values of its config.json.
        prompt_tokens, response_tokens, max_length: means, and the bound.
        pass_tokens: that log-prob passes and updates pad a sequence to; None for its own mean.
        engine_gpus: of an engine; all GPUs of the job have one.
        calls_of: sequences that an engine generates together; None for all of its share.
        overrides: of this project's configuration.
    """

    name: str
    seconds: float
    model: dict[str, Any]
    prompt_tokens: int
    response_tokens: float
    max_length: int
    pass_tokens: int | None
    engine_gpus: int
    calls_of: int | None
    overrides: tuple[str, ...]


def _aligner(nodes: int, tokens: float, seconds: float, micro_batch: int) -> Published:
    return Published(
        f"NeMo-Aligner 70B, {nodes}+{nodes // 2} nodes",
        seconds,
        LLAMA_70B,
        prompt_tokens=1024,
        response_tokens=tokens,
        max_length=1024,
        pass_tokens=2048,
        engine_gpus=8,
        calls_of=micro_batch,
        overrides=(
            f"trainer.num_nodes={nodes}",
            "model.tensor_model_parallel_size=8",
            "model.pipeline_model_parallel_size=8",
            "model.sequence_parallel=true",
            "model.encoder_seq_length=2048",
            "model.micro_batch_size=1",
            "model.reinforce.forward_micro_batch_size=8",
            "model.reinforce.num_rollout_samples=1024",
            "model.reinforce.offload_adam_states=true",
            "model.global_batch_size=128",
            "trainer.reinforce.num_rollouts_per_prompt=1",
            "trainer.reinforce.advantage_estimator=running_mean",
        ),
    )


PUBLISHED = [
    _aligner(8, 350.7, 366.7, 8),
    _aligner(16, 323.3, 190.4, 8),
    _aligner(32, 331.7, 108.0, 8),
    _aligner(64, 334.0, 56.9, 16),
    Published(
        "NeMo-RL 8B, 16 GPUs",
        97.7,
        LLAMA_8B,
        prompt_tokens=120,
        response_tokens=940,
        max_length=3976,
        pass_tokens=None,
        engine_gpus=1,
        calls_of=None,
        overrides=(
            "trainer.num_nodes=2",
            "model.pipeline_model_parallel_size=2",
            "model.encoder_seq_length=4096",
            "model.tokens_per_micro_batch=4096",
            "model.reinforce.num_rollout_samples=64",
            "model.global_batch_size=512",
            "trainer.reinforce.num_rollouts_per_prompt=32",
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=uniform",
            "model.activations_checkpoint_num_layers=1",
            "model.optim.overlap_grad_sync=true",
        ),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose name begins so")
    only = parser.parse_args().only
    console = Console(width=170)
    table = Table(box=None, padding=(0, 2))
    for name in ("run", "generation", "passes", "training", "rest", "predicted s", "published s", "error"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for case in PUBLISHED:
        if only and not case.name.startswith(only):
            continue
        phases = predicted(case, console)
        total = sum(phases.values())
        cells = [f"{phases[name]:.1f}" for name in ("generation", "passes", "training", "rest")]
        table.add_row(case.name, *cells, f"{total:.1f}", f"{case.seconds}", f"{total / case.seconds - 1:+.0%}")
    console.print(ASSUMED, table, sep="\n")


def predicted(case: Published, console: Console) -> dict[str, float]:
    """Seconds of a step by groups of phases."""
    with tempfile.TemporaryDirectory() as folder, Worker(lambda text: console.print(f"{case.name}: {text}")) as worker:
        job = _job(case, Path(folder))
        step = predict(job, worker.measure(job))
    print_step(console, job, step)
    groups = {"generation": _generation(case, job), "passes": 0.0, "training": 0.0, "rest": 0.0}
    for phase in step.phases:
        groups[_group(phase)] += 0.0 if phase.name == "generation" else phase.seconds
    return groups


def _group(phase: PhaseTime) -> str:
    if "log-probs" in phase.name:
        return "passes"
    return {"generation": "generation", "training": "training", "optimizer": "training"}.get(phase.name, "rest")


def _generation(case: Published, job: PredictedJob) -> float:
    """By an engine on every `engine_gpus`, in calls of the published size."""
    engines = job.layout.ranks // case.engine_gpus
    of_engine = -(-_sequences(job) // engines)
    together = min(case.calls_of or of_engine, of_engine)
    engine = Engine(job.architecture, job.machine, case.engine_gpus, together)
    prompts = -(-together // job.batches.samples)
    lengths = Lengths(case.max_length, case.response_tokens)
    calls = -(-of_engine // together)
    _, factor = lengths.of_slowest(engines, calls, together)
    return calls * factor * engine.call_seconds(together, prompts, case.prompt_tokens, lengths)


def _sequences(job: PredictedJob) -> int:
    return job.batches.prompts * job.batches.samples


def _job(case: Published, folder: Path) -> PredictedJob:
    """The same layout and batches here, with passes of the published length."""
    (folder / "config.json").write_text(json.dumps(case.model), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a " * case.prompt_tokens}) + "\n", encoding="utf-8")
    mean = case.response_tokens if case.pass_tokens is None else case.pass_tokens - case.prompt_tokens
    cfg = load_config(
        compose(
            "train_reinforce_actor",
            [
                f"pretrained_checkpoint.restore_from_path={folder}",
                f"model.data.data_prefix.train={folder / 'prompts.jsonl'}",
                f"exp_manager.explicit_log_dir={folder / 'run'}",
                f"model.reinforce.length_params.max_length={case.max_length}",
                f"preflight_response_tokens={int(mean)}",
                "trainer.devices=8",
                "trainer.precision=bf16",
                "model.optim.distributed=true",
                "generation=tensorrt_llm",
                "trainer.reinforce.importance_ratio=token",
                *case.overrides,
            ],
        )
    )
    job = job_of(cfg, read_inputs(cfg), MACHINES["h100"])
    assert job is not None
    # Both systems give each data-parallel rank the same share of an optimizer step.
    return dataclasses.replace(job, sequences_of_update=_sequences(job) / job.batches.updates / job.layout.data)


if __name__ == "__main__":
    main()
