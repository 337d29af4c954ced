"""`from reinforce_rl import train` in a script, in a notebook and in this process."""

from __future__ import annotations

import functools
import json
import linecache
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.tiny_run import MAX_LENGTH, three_letters

import reinforce_rl
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.launch.api import _by_name
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.runtime.settings import record
from reinforce_rl.runtime.status import Status

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model.encoder_seq_length": 16,
    "model.reinforce.length_params.max_length": MAX_LENGTH,
    "model.reinforce.num_rollout_samples": 2,
    "model.optim.lr": 0.01,
    "trainer.reinforce.max_steps": 1,
    "trainer.reinforce.val_check_interval": 0,
    "reward_function.sample_timeout_seconds": 60.0,
}
FUNCTION = """
import re
from collections.abc import Mapping

def vowels(prompt, response, record: Mapping, *, each=1.0):
    return each * len(re.findall("[aeiou]", response)) + record["extra"]
"""
CALL = """
rows = [{"prompt": text, "extra": 0.5} for text in %r]
run = train("model", rows, reward=vowels, output="out", **%r)
print(json.dumps([len(run.metrics), str(run.model), str(run.folder)]))
"""
NOTEBOOK = """
import linecache, json, sys
from reinforce_rl import train
del globals()["__file__"]
for number, cell in enumerate([{function!r}, {call!r}]):
    name = f"<cell {{number}}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_llama_folder(folder, vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16)


def script(folder: Path, model: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "model").symlink_to(model)
    (folder / "my_run.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "my_run.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )


def check(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Check that one step was trained with this function's rewards."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [1, "out/hf", "out"]
    rows = RunFolder(folder / "out").samples(1)
    assert len(rows) == 8
    for row in rows:
        assert row.reward == sum(letter in "aeiou" for letter in row.response) + 0.5
    assert json.loads((folder / "out/hf/config.json").read_text())["training_step"] == 1


HEAD = "import json\nfrom reinforce_rl import train\n"


@pytest.mark.slow  # a notebook's function takes the same path
def test_a_script_without_a_guard(tmp_path: Path, model: Path) -> None:
    check(tmp_path, script(tmp_path, model, HEAD + FUNCTION + CALL % (three_letters(4), SETTINGS)))


@pytest.mark.slow
def test_a_script_whose_function_uses_its_module(tmp_path: Path, model: Path) -> None:
    function = FUNCTION.replace('re.findall("[aeiou]", response)', "VOWELS.findall(response)")
    function = function.replace(
        "import Mapping\n", 'import Mapping\nVOWELS = re.compile("[aeiou]")\n'
    )
    call = CALL % (three_letters(4), SETTINGS)
    guarded = "".join(f"    {line}\n" for line in call.strip().splitlines())
    check(
        tmp_path,
        script(tmp_path, model, f"{HEAD}{function}\nif __name__ == '__main__':\n{guarded}"),
    )
    (tmp_path / "other").mkdir()
    bare = script(tmp_path / "other", model, HEAD + function + call)
    assert bare.returncode == 1
    assert "if __name__ == '__main__':" in bare.stderr


@pytest.mark.more
def test_a_notebook(tmp_path: Path, model: Path) -> None:
    call = CALL % (three_letters(4), SETTINGS)
    check(tmp_path, script(tmp_path, model, NOTEBOOK.format(function=FUNCTION, call=call)))


def named(function: Any) -> None:
    raise AssertionError("never called")


def test_a_function_of_a_module_goes_by_its_name(tmp_path: Path) -> None:
    assert _by_name(named, tmp_path, {}) == (f"{__name__}.named", {})
    assert _by_name(functools.partial(named, limit=3), tmp_path, {}) == (
        f"{__name__}.named",
        {"limit": 3},
    )
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_no_other_process_can_have(tmp_path: Path) -> None:
    limit = 3

    def short(prompt: str, response: str, record: dict) -> float:
        return float(len(response) < limit)

    for reward, why in ((short, "limit"), (lambda *_: 1.0, "<lambda>"), (print, "print")):
        with raises_error("api.reward.not_importable", why, "my_rewards.py"):
            _by_name(reward, tmp_path, {})


def test_mistakes_are_reported_before_a_model_is_loaded(tmp_path: Path, model: Path) -> None:
    with raises_error("config.key.unknown", "trainer.devces", "trainer.devices"):
        reinforce_rl.train(model, ["a"], "json.dumps", tmp_path, **{"trainer.devces": 2})
    with raises_error("config.key.unknown", "max_steps is", "trainer.reinforce.max_steps"):
        reinforce_rl.train(model, ["a"], "json.dumps", tmp_path, max_steps=3)
    download = "hf download some/model --local-dir"
    with raises_error("config.restore_from_path.no_model", "some/model", download):
        reinforce_rl.train("some/model", ["a"], "json.dumps", tmp_path)
    values = ("torchrun --nproc-per-node 2 ", "reinforce-rl train")
    with raises_error("api.ranks.one_process", *values):
        reinforce_rl.train(
            model, ["a"], "json.dumps", tmp_path, **SETTINGS, **{"trainer.devices": 2}
        )
    with raises_error("config.group.not_a_choice", "algorithm is 'grop'", "grpo"):
        reinforce_rl.train(model, ["a"], "json.dumps", tmp_path, algorithm="grop")
    assert list(tmp_path.iterdir()) == []


def test_another_call_with_the_folder_of_a_run_is_refused_and_writes_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(each: float, prompts: list[str], **keys: Any) -> reinforce_rl.Run:
        source = f"def score(prompt, response, record):\n    return {each}  # points\n"
        linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "<cell>", "exec"), namespace)
        return reinforce_rl.train(model, prompts, namespace["score"], tmp_path, **SETTINGS | keys)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    def no_steps(cfg: TrainConfig) -> None:
        (tmp_path / "metrics.jsonl").write_text("")
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        record(cfg)
        (tmp_path / "checkpoints" / "latest").write_text("step_00000001")
        (tmp_path / "status.json").write_text(json.dumps(asdict(Status("finished", step=1))))

    monkeypatch.setattr("reinforce_rl.trainer.run.train", no_steps)
    again(1.0, ["a", "e"])
    before = files()
    more_steps = {"trainer.reinforce.max_steps": 2}
    assert again(1.0, ["a", "e"]).folder == tmp_path  # the run has finished
    for each, prompts, keys in (
        (2.0, ["a", "e"], more_steps),
        (2.0, ["a", "e"], {}),
        (1.0, ["a"], {}),
    ):
        with raises_error("run.resume.other_settings") as error:
            again(each, prompts, **keys)
        changes = r'copied_reward_\w+.score" ->|prompts_\w+.jsonl" ->'
        assert re.search(changes, str(error.value))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with other:
        (tmp_path / "status.json").write_text(
            json.dumps(asdict(Status("running", step=1, pid=other.pid)))
        )
        before = files()
        with raises_error("run.folder.in_use", tmp_path, other.pid):
            again(1.0, ["a", "e"], **more_steps)
        other.communicate(b"\n")
    assert files() == before


def test_the_package_has_no_other_lazy_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'evaluate'"):
        _ = reinforce_rl.evaluate  # type: ignore[attr-defined]
