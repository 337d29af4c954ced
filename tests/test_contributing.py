"""CONTRIBUTING.md's code blocks, applied to a copy of the package.

They work, and touch as many files as the page says.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import printed_keys
from helpers.models import ROOT, tiny_family_folder
from helpers.tiny_run import metrics_of, rollouts_of, three_letters, tiny_overrides

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = {
    "An estimate of the KL": "reinforce_rl/algorithm/kl.py",
    "An estimator": "reinforce_rl/algorithm/advantages.py",
    "A reward": "my_rewards.py",
    "A reward source": "my_source.py",
    "A logger": "my_loggers.py",
    "A model family": "reinforce_rl/megatron/architecture.py",
    "A generator": "reinforce_rl/generation/replay.py",
    "A configuration key": "reinforce_rl/config/actor.py",
}
LOG_PROBS = """
import sys
import torch
from helpers.policies import all_logits, megatron_model, random_tokens
from reinforce_rl.megatron.mesh import parallel_mesh

with parallel_mesh() as mesh:
    lm = megatron_model(sys.argv[1], mesh)
    logits = all_logits(lm, random_tokens(lm.architecture.vocab_size, 3, 40))
    torch.save(logits.log_softmax(-1), sys.argv[2])
"""

AFTER = {
    "A model family": "_FAMILIES = {\n",
    "A configuration key": "class ReinforceConfig(Section):\n",
}


def code_of(heading: str) -> str:
    block = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None, heading
    return block[1]


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the package with the extensions and the files generated from its settings."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("reinforce_rl", "conf", "docs", "examples", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for heading, name in FILES.items():
        path = root / name
        code = code_of(heading)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if heading in AFTER:
            before, line, after = text.partition(AFTER[heading])
            assert line
            path.write_text(before + line + code + after, encoding="utf-8")
        else:
            path.write_text(f"{text}\n\n{code}" if text else code, encoding="utf-8")
    call(root, "tools/config_docs.py", "--write")
    return root


def run_python(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join([str(root), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": folders}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def call(root: Path, *arguments: str | Path) -> None:
    done = run_python(root, *arguments)
    output = done.stdout[-2000:] + done.stderr[-4000:]
    assert done.returncode == 0, output


def test_the_table_counts_the_files(extended):
    rows = dict(re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \| (\d)", PAGE, re.MULTILINE))
    expected = {}
    for heading, name in FILES.items():
        count = int(name.startswith("reinforce_rl/"))
        expected[heading.lower().replace(" ", "-")] = str(count)
    assert rows == expected
    files = [path.relative_to(extended) for path in (extended / "reinforce_rl").rglob("*.py")]
    changed = []
    for file in files:
        is_new = not (ROOT / file).exists()
        if is_new or not filecmp.cmp(ROOT / file, extended / file):
            changed.append(str(file))
    expected = [name for name in FILES.values() if name.startswith("reinforce_rl/")]
    assert sorted(changed) == sorted(expected)


@pytest.mark.more
def test_a_reward_source_in_a_run(extended, tmp_path):
    (tmp_path / "run").mkdir()
    lines = [{"prompt": prompt, "responses": ["e", "e", "in"]} for prompt in three_letters(8)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run/responses.jsonl").write_text(text)
    call(
        extended,
        "examples/train_reinforce_actor.py",
        *tiny_overrides(tmp_path),
        "generation=reinforce_rl.generation.replay.ReplayGenerator",
        "trainer.reinforce.initial_policy_kl_penalty=0",
        "trainer.reinforce.num_rollouts_per_prompt=3",
        "reward=my_source.Novelty",
        "trainer.reinforce.max_steps=1",
    )
    rewards = [row["reward"] for row in rollouts_of(tmp_path, 1)]
    assert rewards == [0.5, 0.5, 1.0] * 4


@pytest.mark.more
def test_estimators_reward_generator_and_logger_in_a_run(extended, tmp_path):
    """Responses are recorded, rewards the function's, advantages differences to the median."""
    (tmp_path / "run").mkdir()
    answers = ["e", "tao", "in"]
    lines = [{"prompt": prompt, "responses": answers} for prompt in three_letters(8)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run/responses.jsonl").write_text(text)
    call(
        extended,
        "examples/train_reinforce_actor.py",
        *tiny_overrides(tmp_path),
        "generation=reinforce_rl.generation.replay.ReplayGenerator",
        "trainer.reinforce.advantage_estimator=median",
        "trainer.reinforce.initial_policy_kl_penalty=0.1",
        "trainer.reinforce.kl_estimator=huber",
        "trainer.reinforce.num_rollouts_per_prompt=3",
        "exp_manager.loggers=[my_loggers.SQLite]",
        "reward=function",
        "reward_function.name=my_rewards.brief",
        "+reward_function.kwargs.limit=2",
        "reward_function.sample_timeout_seconds=60",
        "trainer.reinforce.max_steps=2",
    )
    rows = rollouts_of(tmp_path, 1)
    assert [row["response"] for row in rows] == answers * 4
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0] * 4
    assert [row["advantage"] for row in rows] == [0.0, -1.0, 0.0] * 4
    first, line = metrics_of(tmp_path)
    assert first["train/grad_norm"] > 0
    assert line["train/kl_huber"] == line["train/init_policy_kl"] > 0
    with contextlib.closing(sqlite3.connect(tmp_path / "run/metrics.sqlite")) as database:
        stored = dict(database.execute("SELECT name, value FROM metrics WHERE step = 2"))
    assert stored["train/rewards"] == line["train/rewards"]
    assert stored["train/kl_huber"] == line["train/kl_huber"]


@pytest.mark.more
def test_model_family(extended, tmp_path):
    import torch
    from helpers.policies import random_tokens, transformers_logits, transformers_model

    folder = tiny_family_folder(
        tmp_path / "model", "seed_oss", head_dim=16, tie_word_embeddings=False
    )
    call(extended, "-c", LOG_PROBS, folder, tmp_path / "log_probs.pt")
    model = transformers_model(folder)
    assert any(name.endswith("q_proj.bias") for name, _ in model.named_parameters())
    tokens = random_tokens(model.config.vocab_size, 3, 40)
    expected = transformers_logits(model, tokens).log_softmax(-1)
    torch.testing.assert_close(torch.load(tmp_path / "log_probs.pt"), expected, atol=1e-5, rtol=0)


def test_configuration_key(extended, tmp_path):
    """The field is the key, its line in the YAML, its row in the table and its bound."""
    assert "    max_rounds: 3  # rounds of a game" in (
        extended / "conf/train_reinforce_actor.yaml"
    ).read_text("utf-8")
    assert "kl_estimator: k1  # k1, absolute_k1, k2, k3, huber;" in (
        extended / "conf/train_reinforce_actor.yaml"
    ).read_text("utf-8")
    assert "| `train/kl_huber` |" in (extended / "docs/metrics.md").read_text("utf-8")
    row = "| `trainer.reinforce.max_rounds` | int, rounds | 3 | rounds of a game | - |"
    assert row in (extended / "docs/configuration.md").read_text("utf-8")
    arguments = [*tiny_overrides(tmp_path), "trainer.reinforce.max_rounds=0"]
    done = run_python(extended, "examples/train_reinforce_actor.py", *arguments)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "config.value.out_of_range" in printed_keys(said)
    assert "trainer.reinforce.max_rounds is 0" in said
