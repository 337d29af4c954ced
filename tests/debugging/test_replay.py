"""A recorded run is replayed bit for bit; injected faults are located by phase and place."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.errors import raises_error
from helpers.ranks import call_on_ranks
from helpers.tiny_run import tiny_config
from helpers.toy_server import free_port
from helpers.traps import store
from safetensors.torch import load_file, save_file

from reinforce_rl.debugging import replay as module
from reinforce_rl.debugging.differences import EQUAL_BITS, ROUNDING
from reinforce_rl.debugging.replay import replay
from reinforce_rl.debugging.replay_results import PhaseResult, Replay
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.checkpointer import checkpoint_up_to
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.step_record import RankState, StepRecord, read_record, record_files
from reinforce_rl.runtime import trust
from reinforce_rl.trainer.run import train

again = partial(replay, trust=True)  # the user's own run

RL = "trainer.reinforce"
ALL = ["prompts", "weights", "generate", "score", "logprobs", "advantages", "update"]
REWARD = """
def length_or_letters(prompt, response, record):
    return float(len(response)) + 0.1 * sum(letter in prompt for letter in response)
"""
FUNCTION = ["reward=function", "reward_function.name=planted_reward.length_or_letters"]
SETTINGS = [f"{RL}.max_epochs=3", f"{RL}.save_interval=3", "model.optim.lr=0.01", *FUNCTION]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two prompts each, and checkpoints after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "planted_reward.py").write_text(REWARD)
    sys.path.insert(0, str(folder))
    try:
        train(tiny_config(folder, *SETTINGS))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("planted_reward", None)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may corrupt. Its settings name the files of the copy."""
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    run = copy / "run"
    for path in (run / "config.yaml", run / "config_history.jsonl", *(run / "record").iterdir()):
        path.write_text(path.read_text().replace(str(original), str(copy)))
    monkeypatch.syspath_prepend(str(copy))
    return copy


def first(replayed: Replay) -> PhaseResult:
    return next(phase for phase in replayed.phases if phase.differences)


def verdicts(replayed: Replay) -> dict[str, str]:
    return {phase.name: phase.verdict for phase in replayed.phases}


def test_nothing_differs(folder: Path) -> None:
    said: list[str] = []
    for step, start, updates in (
        (2, 0, "2 updates from the initial model"),
        (5, 3, "2 updates from the checkpoint"),
    ):
        replayed = again(folder / "run", step, say=said.append)
        assert verdicts(replayed) == dict.fromkeys(ALL, "same"), replayed.sentence
        assert replayed.exit_code == 0
        assert replayed.start == start
        assert str(replayed.bounds) == "bit for bit"
        assert replayed.sentence == "Nothing differs."
        assert replayed.facts == []
        assert updates in said[-1]
        assert "the run took" in said[-1]
    assert not any("replay" in path.name for path in (folder / "run").iterdir()), (
        "nothing is left in the run's folder"
    )


def test_steps_on_the_way_are_not_generated_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    generate = NativeGenerator.generate

    def counted(self: NativeGenerator, prompts: Any, *args: Any, **options: Any) -> Any:
        drawn.extend(prompt.id for prompt in prompts)
        return generate(self, prompts, *args, **options)

    monkeypatch.setattr(NativeGenerator, "generate", counted)
    assert again(folder / "run", 2).exit_code == 0, "step 1 is made again on the way"
    prompt_ids = {row.prompt_id for row in RunFolder(folder / "run").samples(2, "rollouts")}
    assert len(drawn) == len(prompt_ids) > 0


def test_a_phase_alone_and_stored_scores(folder: Path) -> None:
    replayed = again(folder / "run", 4, phase="logprobs")
    assert verdicts(replayed) == dict.fromkeys(["prompts", "weights", "logprobs"], "same")
    assert replayed.exit_code == 0
    replayed = again(folder / "run", reward="stored")
    assert replayed.step == 6
    assert replayed.exit_code == 2
    assert verdicts(replayed) == {**dict.fromkeys(ALL, "same"), "score": "not replayed"}
    assert replayed.sentence == "Nothing differs; not replayed: score."


@pytest.mark.more
def test_a_function_that_only_the_folder_names_is_not_called(folder: Path, tmp_path: Path) -> None:
    """With the name `prompts`, it would be imported and called on the recorded prompts."""
    (folder / "planted_reward.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{REWARD}")
    planted_reward_file = folder / "run" / "planted_reward.py"
    planted_reward_file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{REWARD}")
    replayed = replay(folder / "run", 4)
    assert verdicts(replayed)["score"] == "not replayed"
    assert replayed.exit_code == 2
    named = "reward_function.name is 'planted_reward.length_or_letters'"
    with raises_error("trust.setting.only_of_folder", named, "--trust"):
        replay(folder / "run", 4, reward="restart")
    assert not (tmp_path / "ran").exists()
    named = replay(
        folder / "run", 4, overrides=["reward_function.name=planted_reward.length_or_letters"]
    )
    assert verdicts(named)["score"] == "same", "the reader has named it"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("threads", [0, -1, 10**9, module._MOST_THREADS + 1, "4", None, 1.5, True])
def test_threads_of_a_record_are_bounded(folder: Path, threads: Any) -> None:
    path = folder / "run" / "record" / "step_00004.json"
    values = json.loads(path.read_text())
    values["machine"]["threads"] = threads
    path.write_text(json.dumps(values))
    with raises_error("replay.threads.out_of_range", "step 4", threads, module._MOST_THREADS):
        replay(folder / "run", 4)


@pytest.mark.parametrize("given", [[], ["trainer.num_nodes=1"]])
def test_a_folder_does_not_start_a_crowd_of_processes(
    folder: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the reader sets one of the two factors."""
    monkeypatch.setattr(trust, "MOST_RANKS", 1)
    store(folder / "run", {"trainer": {"devices": 2}})
    started: list[int] = []
    with raises_error("trust.setting.only_of_folder", "trainer.devices is '2'", "2 ranks"):
        replay(folder / "run", 4, overrides=given, start=lambda *sizes: started.extend(sizes))
    assert started == []


def change_reward(folder: Path) -> None:
    (folder / "planted_reward.py").write_text(REWARD.replace("0.1", "0.2"))


def change_prompt(folder: Path) -> None:
    path = folder / "train.jsonl"
    lines = path.read_text().splitlines()
    number = read_samples(folder, 5)["prompt_id"][0].as_py()
    text = json.loads(lines[number])["prompt"]
    last = "s" if text[-1] != "s" else "h"
    lines[number] = json.dumps({"prompt": text[:-1] + last})
    path.write_text("\n".join(lines) + "\n")


def read_samples(folder: Path, step: int) -> pa.Table:
    return pq.read_table(folder / "run" / "rollouts" / f"step_{step:05d}.parquet")


def change_token(folder: Path) -> None:
    path = folder / "run" / "rollouts" / "step_00005.parquet"
    table = read_samples(folder, 5)
    rows = table["response_tokens"].to_pylist()
    rows[3][1] = (rows[3][1] + 1) % 30
    place = table.column_names.index("response_tokens")
    tokens = pa.array(rows, pa.list_(pa.int32()))
    pq.write_table(table.set_column(place, "response_tokens", tokens), path)


def change_prompt_tokens(folder: Path) -> None:
    path = folder / "run" / "rollouts" / "step_00005.parquet"
    table = read_samples(folder, 5)
    rows = table["prompt_tokens"].to_pylist()
    rows[1][0] = (rows[1][0] + 1) % 30
    place = table.column_names.index("prompt_tokens")
    tokens = pa.array(rows, pa.list_(pa.int32()))
    pq.write_table(table.set_column(place, "prompt_tokens", tokens), path)


def swap_reference(folder: Path) -> list[str]:
    other = folder / "other"
    shutil.copytree(folder / "model", other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "gate_proj" in name)
    weights[name][0] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return [f"pretrained_checkpoint.restore_from_path={other}"]


PLANTED: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "reward function": (
        change_reward,
        "score",
        "reward",
        "planted_reward.length_or_letters differs",
    ),
    "prompt": (change_prompt, "prompts", "prompt", "the prompts of the training data differ"),
    "token": (change_token, "generate", "response_tokens", ""),
    "seed": (
        lambda _: ["model.seed=77"],
        "generate",
        "response_tokens",
        "setting model.seed: 1234 -> 77",
    ),
    "reference": (
        swap_reference,
        "logprobs",
        "reference_log_probs",
        "the reference policy's weights differ",
    ),
    "beta": (
        lambda _: [f"{RL}.initial_policy_kl_penalty=0.05"],
        "advantages of step 4",
        "reward_with_kl",
        f"setting {RL}.initial_policy_kl_penalty: 0.1 -> 0.05",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str, folder: Path) -> None:
    plant, phase, column, fact = PLANTED[name]
    replayed = again(folder / "run", 5, overrides=plant(folder) or ())
    assert replayed.exit_code == 1, replayed.sentence
    assert first(replayed).name == phase, replayed.sentence
    difference = first(replayed).differences[0]
    assert difference.quantity == column
    assert difference.prompt_id is not None
    assert phase in replayed.sentence
    assert difference.place in replayed.sentence
    if name == "token":
        ids = read_samples(folder, 5).select(["prompt_id", "sample_id"]).slice(3, 1).to_pylist()[0]
        assert (difference.prompt_id, difference.sample_id, difference.token) == (*ids.values(), 1)
        assert difference.count == 1
        assert "the record was changed" in replayed.sentence
    else:
        assert any(fact in text for text in replayed.facts), replayed.facts


def test_one_weight_changed_by_a_millionth(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkpoint, or in the initial model."""
    restore = module.build_trainer

    def restore_and_change(*args: Any) -> Any:
        trainer = restore(*args)
        with torch.no_grad():
            dict(trainer.model.lm.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"][
                3, 4
            ] += 1e-6
        return trainer

    monkeypatch.setattr(module, "build_trainer", restore_and_change)
    for step in (4, 5, 2):
        replayed = again(folder / "run", step)
        weights = first(replayed)
        assert weights.name == "weights"
        assert weights.note == "as they were read"
        assert weights.differences[0].count == 1
        assert weights.differences[0].quantity == "tensor decoder.layers.0.mlp.linear_fc2.weight"
        assert "the checkpoint or the initial model was changed" in replayed.sentence


def test_missing_parts_are_reported(folder: Path) -> None:
    run = folder / "run"
    expected = [1, 2, 3, 4, 5, 6]
    assert list(record_files(run)) == expected
    with raises_error("record.step.missing", run / "record", "step 9", "1 to 6"):
        again(run, 9)
    with raises_error("replay.phase.unknown", "--phase", "'train'"):
        again(run, 4, phase="train")
    with raises_error("config.key.unknown", "model.sed"):
        again(run, 4, overrides=["model.sed=1"])
    record = run / "record" / "step_00004.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "version": 99}))
    with raises_error("record.file.other_version", record, "version 99", "version 1"):
        again(run, 4)
    damaged = {"": "", "null": "JSON object", json.dumps({**values, "step": 5}): "step 5"}
    damaged |= {
        json.dumps({**values, name: None}): ""
        for name in ("machine", "updates", "ranks", "settings")
    }
    damaged[json.dumps({**values, "updates": [None]})] = ""
    for text, reason in damaged.items():
        record.write_text(text)
        with raises_error("record.file.not_readable", record, reason):
            again(run, 4)
    record.write_text(json.dumps(values))
    change_prompt_tokens(folder)
    samples = run / "rollouts" / "step_00005.parquet"
    with raises_error("samples.tokens.prompts_differ", samples, "prompt_tokens") as caught:
        again(run, 5)
    assert re.search(r"prompt \d+, sample \d", str(caught.value))
    (run / "rollouts" / "step_00004.parquet").unlink()
    with raises_error("samples.step.missing", run / "rollouts", "step 4"):
        again(run, 5)
    checkpoint = checkpoint_up_to(run / "checkpoints", 4)
    assert checkpoint is not None
    state = checkpoint.folder / "trainer_state.json"
    state.write_text(state.read_text()[:20])
    with raises_error("checkpoint.state.not_readable", state, checkpoint.folder):
        again(run, 5)


def test_a_missing_server_is_reported_while_waiting(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with raises_error("reward_server.server.no_answer", address):
        again(
            folder / "run",
            4,
            reward=f"http://{address}",
            overrides=["remote_rm.ready_timeout_seconds=1"],
        )
    assert f"reward server {address} does not answer" in " ".join(capsys.readouterr().out.split())


def test_settings_that_changed_on_the_way(folder: Path) -> None:
    history = folder / "run" / "config_history.jsonl"
    line = json.loads(history.read_text().splitlines()[0])
    changed = {**line, "step": 4, "config": line["config"].replace("lr: 0.01", "lr: 0.02")}
    history.write_text(json.dumps(line) + "\n" + json.dumps(changed) + "\n")
    change = "model.optim.lr: 0.01 -> 0.02"
    with raises_error("replay.settings.changed_since_checkpoint", "step 4", "step 5", change):
        again(folder / "run", 5)
    longer = {**changed, "config": re.sub(r"max_steps: -?\d+", "max_steps: 100", line["config"])}
    assert longer["config"] != line["config"]
    history.write_text(json.dumps(line) + "\n" + json.dumps(longer) + "\n")
    assert again(folder / "run", 5).exit_code == 0, (
        "the length changes no step of a constant learning rate"
    )


@pytest.mark.more
def test_another_machine_is_compared_within_rounding(folder: Path) -> None:
    path = folder / "run" / "record" / "step_00004.json"
    values = json.loads(path.read_text())
    values["machine"]["device"] = "CPU, 128 cores"
    path.write_text(json.dumps(values))
    replayed = again(folder / "run", 4)
    assert replayed.exit_code == 2
    assert "rounding" in str(replayed.bounds)
    assert len(replayed.facts) == 1
    assert replayed.sentence == "Nothing differs; not replayed: weights."


def train_in(folder: Path, *overrides: str) -> None:
    train(tiny_config(folder, *overrides))


def again_as_json(folder: Path, reward: str, *overrides: str) -> dict[str, Any]:
    return again(folder / "run", 4, reward=reward, overrides=overrides).as_json()


@pytest.mark.slow
def test_on_two_ranks(folder: Path) -> None:
    """The run was recorded on one rank, whose tokens are used.

    A fault larger than rounding is detected there too.
    """

    def on_two(*overrides: str) -> dict[str, Any]:
        keys = ("trainer.devices=2", *overrides)
        return call_on_ranks(again_as_json, 2, folder, "stored", *keys)[0]

    replayed = on_two()
    skipped = [phase["name"] for phase in replayed["phases"] if phase["verdict"] == "not replayed"]
    assert skipped == ["weights", "generate", "score"]
    names = [phase["name"] for phase in replayed["phases"]]
    assert names == ALL
    assert replayed["exit_code"] == 2, replayed["phases"]
    assert replayed["bounds"]["absolute"] > 0
    assert on_two("model.tensor_model_parallel_size=2")["exit_code"] == 2
    wrong = on_two(*swap_reference(folder))
    assert wrong["exit_code"] == 1
    assert wrong["sentence"].startswith("The first difference is in logprobs")


@pytest.mark.more
def test_recorded_on_two_ranks(tmp_path: Path) -> None:
    reward = "reward_function.name=helpers.reward_functions.counted"
    call_on_ranks(train_in, 2, tmp_path, *SETTINGS, reward, "trainer.devices=2")
    record = read_record(tmp_path / "run", 4)
    assert [len(phase.after) > 1 for phase in record.ranks] == [True, False]
    replayed = call_on_ranks(again_as_json, 2, tmp_path, "restart")[0]
    assert {phase["name"]: phase["verdict"] for phase in replayed["phases"]} == dict.fromkeys(
        ALL, "same"
    ), replayed


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "generates"), [(0, "same"), (1, "not replayed")])
def test_recorded_with_separate_generators(staleness: int, generates: str, tmp_path: Path) -> None:
    """One rank trains and one generates.

    A single rank replays them, and generates only the samples of current weights.
    """
    apart = [
        "placement=disaggregated",
        "generation_ranks=1",
        f"max_staleness={staleness}",
        "trainer.devices=2",
    ]
    reward = "reward_function.name=helpers.reward_functions.counted"
    call_on_ranks(train_in, 2, tmp_path, *SETTINGS, reward, *apart)
    replayed = again(tmp_path / "run", 5)
    assert verdicts(replayed) == {**dict.fromkeys(ALL, "same"), "generate": generates}, (
        replayed.sentence
    )


@pytest.mark.parametrize("kind", ["after", "optimizer"])
def test_the_moments_of_adam_are_compared(kind: str) -> None:
    """Weights after a step may be equal although the moments differ; the next step diverges."""

    def record(checksum: str) -> StepRecord:
        facts: dict[str, Any] = {
            "software": {},
            "machine": {},
            "layout": {},
            "settings": {},
            "files": {},
        }
        tensors = {"before": {}, "after": {}, "optimizer": {}, kind: {"w.exp_avg_sq": checksum}}
        state = RankState(0, **tensors, random="")
        updates = [{"loss": 0.5}]
        values = {"step": 3, "past": {}, "data": {}, "scorer": None, "reference": None}
        return StepRecord(updates=updates, ranks=[state], **values, **facts)

    same = module._compare_update(record("01"), record("01"), EQUAL_BITS)
    assert same.name == "update"
    assert same.verdict == "same"
    other = module._compare_update(record("01"), record("02"), EQUAL_BITS)
    assert other.verdict == "differs"
    differing = [difference.quantity for difference in other.differences]
    assert differing == ["tensor w.exp_avg_sq"]
    rounded = module._compare_update(record("01"), record("02"), ROUNDING)
    assert rounded.verdict == "same"
    assert rounded.note != "", "what was not compared is said"
