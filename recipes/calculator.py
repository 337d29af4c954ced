"""The recipe "calculator": a small model learns to call a tool, on two cores.

python recipes/calculator.py [--seed 1234] [--out results/recipes/calculator] [KEY=VALUE ...]

Start it in the repository's root. The task is the product of two numbers of three digits, which
SmolLM2-135M cannot compute. It may write <calc>EXPRESSION</calc>, is told the value, and answers.
An episode has the reward 1 if the answer is right. The last line is the accuracy on held-out
products, before the training and after it.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from reinforce_rl.launch.smollm2 import prepare_smollm2
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.rewards.environment import Reply

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = (
    "You have a calculator. Write <calc>EXPRESSION</calc> to use it. When you know the value, "
    "write it."
)
# It shows how to call the calculator, but not what to do with its value.
EXAMPLE = (
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "<calc>17 + 25</calc>"},
)
SIZES = {"train": 320, "validation": 48}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SECONDS = 3600


def calculator(answer: str, record: dict[str, Any], rng: random.Random) -> Reply:
    """Reply to a call with its value; grade an answer."""
    call = re.search(r"<calc>(.*?)</calc>", answer, re.DOTALL)
    if call:
        return Reply(f"The calculator says {value_of(call[1])}.")
    numbers = re.findall(r"\d+", answer.replace(",", ""))
    is_right = numbers[-1:] == [str(record["value"])]
    return Reply(reward=float(is_right), is_end=True)


def value_of(expression: str) -> int | str:
    """Return the value of sums and products of integers, or what is wrong with the expression."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return "that it cannot compute this"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        left = _value(node.left)
        right = _value(node.right)
        operation = OPERATORS[type(node.op)]
        return operation(left, right)
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    raise ValueError("expected integers, +, - and *")


def records(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the products of each part; no product is in both."""
    draw = random.Random(seed)
    pairs = set()
    while len(pairs) < sum(SIZES.values()):
        left = draw.randint(100, 999)
        right = draw.randint(100, 999)
        pairs.add((left, right))
    shuffled = sorted(pairs)
    draw.shuffle(shuffled)
    parts = {}
    for name, size in SIZES.items():
        parts[name] = [_record(*pair) for pair in shuffled[:size]]
        shuffled = shuffled[size:]
    return parts


def _record(left: int, right: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {left} * {right}?"}
    system = {"role": "system", "content": SYSTEM}
    messages = [system, *EXAMPLE, question]
    return {"messages": messages, "value": left * right}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1234, help="of samples and order (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/recipes/calculator"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    model = prepare_smollm2()
    data = args.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, part in records(seed=20).items():
        lines = [json.dumps(record) + "\n" for record in part]
        files[name] = data / f"{name}.jsonl"
        files[name].write_text("".join(lines), encoding="utf-8")
    run = args.out / f"seed_{args.seed}"
    command = [sys.executable, "-m", "reinforce_rl", "train"]
    command += ["--config-dir", str(ROOT / "recipes"), "--config-name", "calculator"]
    command += [
        f"model.seed={args.seed}",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"exp_manager.explicit_log_dir={run}",
        f"model.data.data_prefix.train={files['train']}",
        f"model.data.data_prefix.validation={files['validation']}",
        *args.overrides,
    ]
    subprocess.run(command, check=True, timeout=SECONDS, cwd=ROOT)
    accuracies = []
    for line in read_metrics(run / "metrics.jsonl"):
        if "val/rewards" in line:
            accuracies.append(line["val/rewards"])
    before = accuracies[0]
    after = accuracies[-1]
    print(f"held-out accuracy: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
