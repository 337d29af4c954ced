"""Measure the dashboard's answers about a run of 100,000 steps, and its memory.

python benchmarks/dashboard.py                 (about two minutes on one core; 200 MB of disk)
python benchmarks/dashboard.py --steps 10000

Writes a run with realistic metrics (training, timers, memory, a validation every 50 steps) and a
short run beside it, starts `reinforce-rl dashboard` on their folder, and measures its answers by
HTTP: the first, the ones until everything is read, one after another step, the list of runs, and
answers about the short run while the long one is read. Memory is the server's largest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from rich.console import Console
from rich.table import Table

TRAIN = (
    "rewards",
    "reward_std",
    "reward_group_std",
    "rewards_with_kl",
    "init_policy_kl",
    "actor_loss",
    "grad_norm",
    "lr",
    "entropy_sampled",
    "response_lengths",
    "fraction_of_samples_properly_ended",
    "fraction_of_samples_scored",
    "fraction_of_samples_trained",
    "fraction_of_groups_with_zero_std",
    "generator_logprob_diff",
    "generator_logprob_diff_p99",
    "generator_logprob_diff_max",
    "repetition",
    "compression",
    "prompts_repeated",
    "length_reward_correlation",
    "baseline",
    "advantages",
    "staleness",
    "tokens",
    "skipped_step",
    "ratio_mean",
    "ratio_max",
    "clip_fraction",
    "rewards_math",
    "rewards_code",
)
PHASES = ("generate", "logprobs", "init_logprobs", "reward_wait", "train_time", "step_time")
TIMING = [
    f"{phase}/{name}" for phase in ("generate", "train_time") for name in ("rank", "max", "median")
]
VALIDATION = (
    "rewards",
    "reward_std",
    "response_lengths",
    "fraction_of_samples_properly_ended",
)
VALIDATION_STEPS = 50
WAIT = 600.0  # seconds
POLL = 1.0


@dataclass(frozen=True)
class Answer:
    seconds: float
    size: int  # bytes
    content: Any  # None for 204, nothing new


def line_of(step: int, generator: random.Random) -> str:
    values: dict[str, Any] = {"step": step, "time": 1.7e9 + 60.0 * step}
    values |= {f"train/{name}": generator.gauss(1.0, 0.1) for name in TRAIN}
    values |= {f"timers/{name}": generator.uniform(1.0, 2.0) for name in PHASES}
    values |= {f"memory/{name}": generator.uniform(30.0, 40.0) for name in PHASES[:-1]}
    values |= {f"timing/{name}": generator.uniform(1.0, 2.0) for name in TIMING}
    values |= {"train/skipped_step": 0.0, "timers/step_time": 12.0}
    if step % VALIDATION_STEPS == 0:
        values |= {f"val/{name}": generator.gauss(1.0, 0.1) for name in VALIDATION}
    return json.dumps(values) + "\n"


def make_run(folder: Path, steps: int) -> None:
    folder.mkdir()
    generator = random.Random(0)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(line_of(step, generator))


def ask(url: str) -> Answer:
    start = time.perf_counter()
    with urlopen(url, timeout=WAIT) as response:
        data = response.read()
    seconds = time.perf_counter() - start
    return Answer(seconds, len(data), json.loads(data) if data else None)


def measure(folder: Path, steps: int) -> list[tuple[str, str]]:
    command = [sys.executable, "-m", "reinforce_rl", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            started, _, _ = server.stdout.readline().partition("; ")
            _, _, url = started.rpartition(" on ")
            idle = psutil.Process(server.pid).memory_info().rss
            runs = ask(f"{url}/api/runs")
            begin = time.perf_counter()
            first = ask(f"{url}/api/run?name=long")
            slowest = first.seconds
            slowest_short = 0.0
            number_short = 0
            has_all_steps = 0.0
            answer = first
            while "so far" in answer.content["span"]:
                short = ask(f"{url}/api/run?name=short&stamp={number_short}")
                number_short += 1
                slowest_short = max(slowest_short, short.seconds)
                time.sleep(POLL)
                answer = ask(f"{url}/api/run?name=long")
                slowest = max(slowest, answer.seconds)
                if not has_all_steps and "metrics.jsonl" not in answer.content["span"]:
                    has_all_steps = time.perf_counter() - begin
            complete = time.perf_counter() - begin
            stamp = answer.content["stamp"]
            same = ask(f"{url}/api/run?name=long&stamp={stamp}")
            with (folder / "long" / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line_of(steps + 1, random.Random(1)))
            later = ask(f"{url}/api/run?name=long&stamp={stamp}")
            reward = later.content["series"]["train/rewards"]
            axis = later.content["axes"][reward["axis"]]
            assert axis["step"][-1] == steps + 1
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
            _, _, peak_line = status.partition("VmHWM:")
            kibibytes, *_ = peak_line.split()
            peak = int(kibibytes) * 1024
            server.terminate()
            start = time.perf_counter()
            server.wait(WAIT)
            end = time.perf_counter() - start
        finally:
            server.kill()
    return [
        ("list of runs", f"{runs.seconds:.2f} s"),
        ("first answer, with what has been read by then", f"{first.seconds:.2f} s"),
        ("slowest answer until all has been read", f"{slowest:.2f} s"),
        ("slowest answer about the short run meanwhile", f"{slowest_short:.2f} s"),
        ("from the first request until all steps are drawn", f"{has_all_steps:.0f} s"),
        ("from the first request until the alerts of all steps are there", f"{complete:.0f} s"),
        ("answer where nothing is new", f"{same.seconds:.2f} s"),
        ("answer after one more step", f"{later.seconds:.2f} s, {later.size / 1e6:.1f} MB"),
        ("memory of the server before the first request", f"{idle / 1e6:.0f} MB"),
        ("memory of the server at its peak", f"{peak / 1e6:.0f} MB"),
        ("end after SIGTERM", f"{end:.1f} s"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=100_000, help="of the long run; default %(default)s"
    )
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="dashboard-"))
    try:
        make_run(folder / "long", options.steps)
        make_run(folder / "short", 100)
        size = (folder / "long" / "metrics.jsonl").stat().st_size
        rows = measure(folder, options.steps)
    finally:
        shutil.rmtree(folder)
    megabytes = size / 1e6
    title = f"A run of {options.steps:,} steps, {megabytes:.0f} MB of metrics.jsonl"
    table = Table("", "measured", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    width = os.environ.get("COLUMNS", "100")
    Console(width=int(width)).print(table)


if __name__ == "__main__":
    main()
