"""Run TRL's side of against_trl.py: python trl_side.py SETTINGS.json CURVE.json

Runs in the peers' environment.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import RLOOConfig, RLOOTrainer  # type: ignore[import-not-found]

from reinforce_rl.rewards.functions import instructions

FIELDS = ("keys", "min_words", "max_words", "keyword")


def scores(completions: list[Any], partial: bool, columns: dict[str, Any]) -> list[float]:
    values = []
    for row, completion in enumerate(completions):
        record = {name: columns[name][row] for name in FIELDS}
        text = completion[0]["content"]
        values.append(instructions("", text, record, partial=partial))
    return values


def rewards(completions: list[Any], **columns: Any) -> list[float]:
    return scores(completions, True, columns)


def accuracy(completions: list[Any], **columns: Any) -> list[float]:
    return scores(completions, False, columns)


def main(settings_file: str, curve_file: str) -> None:
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    rows = []
    for line in Path(settings["prompts"]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        rows.append(row)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLOOTrainer(
            model=settings["model"],
            reward_funcs=[rewards, accuracy],
            args=RLOOConfig(
                output_dir=folder,
                **settings["args"],
                logging_steps=1,
                # TRL would compute activations again in the backward pass, and the other side does
                # not.
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32", "trust_remote_code": False},
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(
                settings["model"], trust_remote_code=False
            ),
        )
        trainer.train()
        steps = [line for line in trainer.state.log_history if "reward" in line]
    accuracies = [line["rewards/accuracy/mean"] for line in steps]
    # TRL's own "reward" has the KL taken off.
    sums = []
    for line in steps:
        sums.append(line["rewards/rewards/mean"] + line["rewards/accuracy/mean"])
    curve = {"rewards": sums, "rewards_accuracy": accuracies}
    Path(curve_file).write_text(json.dumps(curve), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
