"""A tiny run with an environment."""

from __future__ import annotations

from pathlib import Path

from helpers.models import tiny_llama_folder
from helpers.tiny_run import tiny_overrides

from reinforce_rl.utils.files import write_json_lines

ENVIRONMENTS = "helpers.environment_functions"
# A random model rarely draws the end token, and an answer that is cut ends its episode.
ENDS = "[e,t,a,o,i,n,s,h,r]"


def episode_overrides(folder: Path, environment: str, *overrides: str) -> list[str]:
    """Write a model and conversations below `folder`; return the overrides of a short run.

    `environment` is a name of `helpers.environment_functions`; empty for none.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        tiny_llama_folder(folder / "model", vocab_size=128, layers=1, hidden=16, ffn=32)
    base = tiny_overrides(folder)
    for name, count in (("train", 8), ("validation", 3)):
        lines = [
            {"messages": [{"role": "user", "content": "hi" * (1 + i % 3)}], "word": f"w{i}"}
            for i in range(count)
        ]
        path = folder / f"{name}_chats.jsonl"
        write_json_lines(path, lines)
        base.append(f"model.data.data_prefix.{name}={path}")
    base += [
        "model.encoder_seq_length=128",
        "trainer.reinforce.val_check_interval=2",
        "trainer.reinforce.num_rollouts_per_prompt=3",
        f"model.reinforce.sampling_params.end_strings={ENDS}",
        f"model.reinforce.val_sampling_params.end_strings={ENDS}",
    ]
    if environment:
        base += [
            "reward=environment",
            f"environment.name={ENVIRONMENTS}.{environment}",
            "environment.max_episode_tokens=96",
        ]
    return [*base, *overrides]
