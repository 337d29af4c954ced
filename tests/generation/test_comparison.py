"""Where two generators diverge, and the command that compares an engine with the native one."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import LayersOfTransformers
from typer.main import get_command

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.engine import generator as engine_generator
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.launch.check_engine import compare
from reinforce_rl.launch.main import app

PROMPTS = [Prompt(0, "", (5,)), Prompt(1, "", (6,))]
GREEDY = SamplingParams(max_length=3, use_greedy=True)


class Fixed:
    """Returns the same responses for any request."""

    def __init__(self, rows: list[list[int]], log_probs: list[list[float]] | None):
        lengths = [len(row) for row in rows]
        width = max(lengths)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        values = None
        if log_probs is not None:
            padded = [row + [0.0] * (width - len(row)) for row in log_probs]
            values = torch.tensor(padded)
        self._found = Completions(tokens, torch.tensor(lengths), (FINISH_STOP,) * len(rows), values)

    def awake(self):
        return contextlib.nullcontext()

    def generate(self, prompts, num_samples, params, seed) -> Completions:
        return self._found

    def refit(self) -> None:
        pass

    def close(self) -> None:
        pass


def check(*arguments: str) -> int:
    """Run the command and return its exit code."""
    group: Any = get_command(app)
    return (
        group.commands["check"].commands["engine"].main(list(arguments), standalone_mode=False) or 0
    )


def test_only_what_lies_before_a_difference_is_compared():
    log_probs = [[-1.0, -2.0, -3.0], [-0.5]]
    left = Fixed([[3, 4, 5], [6]], log_probs)
    rows = [[3, 4, 9], [6, 7]]
    right = Fixed(rows, [[-1.5, -2.0, -9.0], [-0.4, -1.0]])
    comparison = compare(left, right, PROMPTS, GREEDY)
    assert comparison.responses == 2
    assert comparison.equal_responses == 0
    assert comparison.tokens == 4
    assert comparison.common_tokens == 3
    assert math.isclose(comparison.mean_gap, (0.5 + 0 + 0.1) / 3, abs_tol=1e-6)
    assert math.isclose(comparison.largest_gap, 0.5, abs_tol=1e-6)


def test_the_worst_prompt_is_known():
    log_probs = [[-1.0, -2.0], [-1, -1]]
    left = Fixed([[3, 4], [6, 8]], log_probs)
    right = Fixed([[3, 4], [6, 7]], [[-1.0, -2.0], [-4, -1]])
    assert compare(left, right, PROMPTS, GREEDY).worst == (6, 6)


def test_without_a_common_token_nothing_was_compared():
    left = Fixed([[3], [4]], [[-1.0], [-1.0]])
    right = Fixed([[5], [6]], [[-1.0], [-1.0]])
    comparison = compare(left, right, PROMPTS, GREEDY)
    assert comparison.common_tokens == 0
    assert math.isnan(comparison.mean_gap)
    assert comparison.worst == (5,)


def test_without_log_probs_there_is_no_gap():
    left = Fixed([[3], [4]], [[-1.0], [-1.0]])
    right = Fixed([[3], [4]], None)
    comparison = compare(left, right, PROMPTS, GREEDY)
    assert comparison.equal_responses == 2
    assert math.isnan(comparison.mean_gap)


def model_below(folder: Path) -> str:
    return str(tiny_llama_folder(folder / "model", vocab_size=64, max_positions=64))


OPTIONS = [
    "--engine",
    "tensorrt_llm",
    "--precision",
    "32",
    "--max-length",
    "4",
    "--bucket-megabytes",
    "1",
]


def test_the_command_with_native_against_native(tmp_path, capsys):
    assert check(model_below(tmp_path), *OPTIONS, "--engine", "native") == 0
    assert capsys.readouterr().out.count("8 of 8 responses equal, ") == 2


@pytest.mark.more
def test_the_command_with_the_fake_engine(tmp_path, capsys, fake_engine):
    fake_engine()
    logs = ["--log-folder", str(tmp_path / "logs")]
    assert check(model_below(tmp_path), *OPTIONS, *logs, "--tolerance", "1e-4") == 0
    assert capsys.readouterr().out.count("8 of 8 responses equal, ") == 2


@pytest.mark.more
def test_prompts_may_be_longer_than_a_run_takes_by_default(tmp_path, capsys, fake_engine):
    fake_engine()
    model = tiny_llama_folder(tmp_path / "model", vocab_size=64, max_positions=4096)
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "two " * 600}))
    files = ["--prompts", str(prompts), "--log-folder", str(tmp_path / "logs")]
    assert check(str(model), *OPTIONS, *files, "--tolerance", "1e-3") == 0
    assert "1 of 1 responses equal, " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_sees_an_engine_that_kept_the_old_weights(
    tmp_path, capsys, fake_engine, monkeypatch
):
    fake_engine()
    send = engine_generator.send_weights
    sent = []

    def send_copies(lm, deliver, **options):
        if not sent:
            sent.extend(p.detach().clone() for p in lm.parameters())
        now = [p.detach().clone() for p in lm.parameters()]
        with torch.no_grad():
            for parameter, old in zip(lm.parameters(), sent, strict=False):
                parameter.copy_(old)
            send(lm, deliver, **options)
            for parameter, new in zip(lm.parameters(), now, strict=True):
                parameter.copy_(new)

    monkeypatch.setattr(engine_generator, "send_weights", send_copies)
    logs = ["--log-folder", str(tmp_path / "logs")]
    assert check(model_below(tmp_path), *OPTIONS, *logs, "--tolerance", "1e-4") == 1


def test_the_command_names_the_layer(tmp_path, capsys, monkeypatch):
    """With --layers always; without it, if log-probs differ.

    Scaled weights are an update that the other engine lacks.
    """
    folder = model_below(tmp_path)
    stale = LayersOfTransformers(Path(folder))
    monkeypatch.setattr(
        NativeGenerator,
        "layer_outputs",
        lambda self, tokens: stale.layer_outputs(tokens),
        raising=False,
    )
    assert check(folder, *OPTIONS, "--engine", "native", "--layers") == 0
    before, after = capsys.readouterr().out.split("no layer differs")
    assert before.count("\n") == 3
    assert "they diverge in layer 1" in after
    assert check(folder, *OPTIONS, "--engine", "native") == 0
    assert "layer" not in capsys.readouterr().out
    assert check(folder, *OPTIONS, "--engine", "native", "--tolerance", "-1") == 1
    assert "they diverge in layer 1" in capsys.readouterr().out
