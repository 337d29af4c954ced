"""Runs with an environment: what one turn equals, resuming, failures, faults of the settings."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.chat_templates import LAST_IS_MARKED
from helpers.episode_run import ENVIRONMENTS, episode_overrides
from helpers.errors import keys_of
from helpers.models import tiny_llama_folder
from helpers.tiny_run import (
    compose,
    however_cut,
    largest_difference,
    metrics_of,
    rollouts_of,
    without_times,
)
from helpers.trainer_processes import TrainerProcesses, assert_equal_runs, has_finished
from rich.console import Console

from reinforce_rl.config.load import load_config
from reinforce_rl.data import tool_calls
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.debugging.replay import replay
from reinforce_rl.errors import ConfigError, DataError, key_of
from reinforce_rl.monitoring.records import read_rows, read_tokens, rollout_files
from reinforce_rl.preflight.run import examine
from reinforce_rl.rewards.environment_pool import EnvironmentPool
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.trainer.run import train
from reinforce_rl.utils.files import write_json_lines

APART = ("placement=disaggregated", "generation_ranks=1")


def run(folder: Path, environment: str, *overrides: str) -> list[dict]:
    train(load_config(compose(*episode_overrides(folder, environment, *overrides))))
    return [without_times(line) for line in metrics_of(folder)]


def test_an_environment_that_ends_at_once_is_a_reward_function(tmp_path):
    """Bit for bit: noise, advantages and updates of one turn are as without an environment."""
    episodes = run(tmp_path / "episodes", "graded_once")
    function = ("reward=function", f"reward_function.name={ENVIRONMENTS}.parity_reward")
    plain = run(tmp_path / "plain", "", *function)
    for line, expected in zip(episodes, plain, strict=True):
        turns = {key: line.pop(key) for key in list(line) if key.endswith("/turns")}
        assert set(turns.values()) == {1.0}
        assert line == expected


def test_rewritten_histories_are_trained_on_and_replayed(tmp_path):
    episode_overrides(tmp_path, "odd_letters")  # writes the model
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template = LAST_IS_MARKED
    tokenizer.save_pretrained(tmp_path / "model")
    lines = run(tmp_path, "odd_letters", "trainer.reinforce.initial_policy_kl_penalty=0.1")
    steps = [line for line in lines if "train/turns" in line]
    assert max(line["train/turns"] for line in steps) > 1
    # Contexts begin in the record, and the engine's log-probs are the trainer's.
    tokens = read_tokens(rollout_files(tmp_path / "run")[2])
    rewritten = [sample for sample in tokens if any(sample.history_mask or ())]
    assert rewritten
    for sample in rewritten:
        columns = (
            sample.policy_mask,
            sample.history_mask,
            sample.policy_log_probs,
            sample.generator_log_probs,
        )
        for is_policy, is_history, trained, generated in zip(*columns, strict=True):
            assert not (is_policy and is_history)
            assert trained == pytest.approx(generated, abs=1e-5)
            assert is_policy or trained == 0
        texts = sample.token_texts or []
        assert "*" in "".join(texts)
        assert "hi" in "".join(itertools.compress(texts, sample.history_mask or ()))
    replayed = replay(tmp_path / "run", 2, trust=True)
    verdicts = {phase.name: phase.verdict for phase in replayed.phases}
    unlike = {name for name, verdict in verdicts.items() if verdict != "same"}
    assert unlike <= {"generate", "score"}


def test_one_continuous_turn_is_a_reward_function(tmp_path):
    """Bit for bit, too: rows that nobody answers are decoded as without an environment."""
    continuous = run(tmp_path / "mine", "graded_once", "environment.continuous=true")
    assert continuous == run(tmp_path / "rounds", "graded_once")


def test_a_run_learns_from_episodes_and_resumes(tmp_path):
    whole = run(tmp_path / "whole", "odd_letters", "trainer.reinforce.max_epochs=2")
    assert len(whole) == 5  # with the validation before the first step
    assert max(line.get("train/turns", 0) for line in whole) > 1
    assert max(line.get("val/turns", 0) for line in whole) > 1
    steps = ("trainer.reinforce.max_epochs=2", "trainer.reinforce.save_interval=1")
    run(tmp_path / "cut", "odd_letters", *steps, "trainer.reinforce.max_steps=2")
    resumed = run(tmp_path / "cut", "odd_letters", *steps)
    assert resumed[-2:] == whole[-2:]
    assert rollouts_of(tmp_path / "cut", 4) == rollouts_of(tmp_path / "whole", 4)


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


def finish(processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int = 1) -> Path:
    return processes.finish(
        folder, *episode_overrides(folder, "odd_letters"), *overrides, ranks=ranks
    )


@pytest.fixture(scope="module")
def one_rank(processes, tmp_path_factory) -> Path:
    return finish(processes, tmp_path_factory.mktemp("one"))


@pytest.mark.more
@pytest.mark.parametrize("layout", ["", "tensor", "pipeline", "context"])
def test_the_layout_does_not_matter(layout, one_rank, processes, tmp_path):
    settings = [f"model.{layout}_parallel_size=2"] if layout == "context" else []
    if layout in ("tensor", "pipeline"):
        settings = [f"model.{layout}_model_parallel_size=2"]
    if layout == "pipeline":
        # the other layouts have one layer, which two stages cannot share
        alone = tmp_path / "alone"
        alone.mkdir()
        tiny_llama_folder(alone / "model", vocab_size=128, layers=2, hidden=16, ffn=32)
        one_rank = finish(processes, alone)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model").symlink_to(alone / "model")
    folder = finish(processes, tmp_path / "run", *settings, ranks=2)
    lines = metrics_of(folder)
    assert len(lines) == len(metrics_of(one_rank))
    for line, expected in zip(lines, metrics_of(one_rank), strict=True):
        assert largest_difference(however_cut(line), however_cut(expected)) < 1e-5


@pytest.mark.more
def test_generator_ranks_play_what_the_trainer_would(one_rank, processes, tmp_path):
    folder = finish(processes, tmp_path / "apart", *APART, "max_staleness=0", ranks=2)
    for line, expected in zip(metrics_of(folder), metrics_of(one_rank), strict=True):
        assert without_times(line) == without_times(expected)


@pytest.mark.slow
def test_an_asynchronous_run_survives_kills(processes, tmp_path):
    """To the same bits: the environment's random numbers are keyed, as all others are."""
    asynchronous = (
        "trainer.reinforce.save_interval=1",
        "trainer.reinforce.max_epochs=4",
        "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
        *APART,
    )
    expected = finish(processes, tmp_path / "whole", *asynchronous, ranks=2)
    killed = tmp_path / "killed"
    overrides = [*episode_overrides(killed, "odd_letters"), *asynchronous]
    draw = random.Random(4)
    for _ in range(10):
        if not has_finished(killed):
            processes.kill_at_random(killed, draw, 0.3, *overrides, ranks=2)
    finish(processes, killed, *asynchronous, ranks=2)
    assert_equal_runs(killed, expected)


@pytest.mark.more
@pytest.mark.parametrize("more_rewards", [False, True])
def test_a_replay_plays_the_episodes_again(more_rewards, tmp_path, monkeypatch):
    overrides = episode_overrides(tmp_path, "odd_letters", "exp_manager.record=full")
    if more_rewards:
        name = f"{ENVIRONMENTS}.parity_reward"
        overrides.append(f"+reward_function.more_functions.parity.name={name}")
    train(load_config(compose(*overrides)))
    trusted = {phase.name: phase for phase in replay(tmp_path / "run", trust=True).phases}
    assert {name: phase.verdict for name, phase in trusted.items()} == dict.fromkeys(
        trusted, "same"
    )
    assert {"generate", "score", "update"} <= trusted.keys()
    started = []
    monkeypatch.setattr(EnvironmentPool, "start", lambda pool: started.append(pool))
    stored = {phase.name: phase.verdict for phase in replay(tmp_path / "run").phases}
    assert not started, "nobody has trusted the environment of the folder"
    assert (stored.pop("generate"), stored.pop("score")) == ("not replayed", "not replayed")
    assert set(stored.values()) == {"same"}


@pytest.mark.more
def test_a_preflight_loads_the_environment(tmp_path):
    def keys(environment: str) -> list[str]:
        plan = compose(*episode_overrides(tmp_path, environment))
        examination = examine(plan, Console(file=io.StringIO()))
        return [key_of(fault) for fault in examination.faults]

    assert keys("nothing") == ["environment.name.not_usable"]
    assert keys("odd_letters") == []


# Describes tools by their names alone, and writes calls as Qwen's template does.
TOOL_TEMPLATE = (
    "{% if tools %}S:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ message.role[0] | upper }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def write_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder / "model")


def test_a_run_with_tools(tmp_path, monkeypatch):
    """A random model draws no JSON, so answers of an even length stand for a call here."""

    def read(text: str) -> tool_calls._Read:
        if "<tool_call>" in text:  # the probe of the template
            return hermes(text)
        calls = [] if len(text) % 2 else [tool_calls._Call("word", {})]
        return tool_calls._Read(text, calls)

    hermes = tool_calls.TOOL_FORMATS["hermes"]
    monkeypatch.setitem(tool_calls.TOOL_FORMATS, "hermes", read)
    for name in ("first", "second"):
        episode_overrides(tmp_path / name, "TwoTools")
        write_template(tmp_path / name)
    lines = run(tmp_path / "first", "TwoTools")
    assert max(line.get("train/turns", 0) for line in lines) > 1
    assert not any(line.get("train/fraction_of_samples_scored", 1) < 1 for line in lines)
    rows = rollouts_of(tmp_path / "first", 2)
    assert any(re.search(r"T: w\d \dA:", row["response"]) for row in rows)
    assert all(row["prompt"].startswith("S: add wordU:") for row in rows)
    run(tmp_path / "second", "TwoTools")
    assert rollouts_of(tmp_path / "second", 2) == rows


class TestDescriptions:
    """The tools in a prompt: those of the record, else those of the environment."""

    def prompts(self, folder: Path, *overrides: str) -> list[Prompt]:
        cfg = load_config(compose(*episode_overrides(folder, "TwoTools"), *overrides))
        train = build_datasets(cfg, load_tokenizer(folder / "model"), splits=["train"]).train
        return [train[number] for number in range(len(train))]

    def test_the_records_come_first(self, tmp_path):
        overrides = episode_overrides(tmp_path, "TwoTools")
        write_template(tmp_path)
        tool = {"type": "function", "function": {"name": "word"}}
        messages = [{"role": "user", "content": "hi"}]
        lines = [{"messages": messages}, {"messages": messages, "tools": [tool]}]
        write_json_lines(tmp_path / "train_chats.jsonl", lines)
        cfg = load_config(compose(*overrides))
        train = build_datasets(cfg, load_tokenizer(tmp_path / "model"), splits=["train"]).train
        assert [train[number].text.partition("U:")[0] for number in range(2)] == [
            "S: add word",
            "S: word",
        ]

    def test_a_template_without_tools_needs_the_format(self, tmp_path):
        with pytest.raises(ConfigError) as raised:
            self.prompts(tmp_path)
        assert "environment.tool_format.unknown" in keys_of(raised.value)
        prompts = self.prompts(tmp_path, "environment.tool_format=hermes")
        assert prompts[0].text == "U: hi<eos>A:"
        assert "tools" not in prompts[0].metadata


def test_failed_episodes_are_counted_and_do_not_train(tmp_path):
    overrides = episode_overrides(
        tmp_path, "FailsAtTheSecond", "trainer.reinforce.max_failed_fraction=1"
    )
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "fails": i % 4 == 0} for i in range(8)
    ]
    write_json_lines(tmp_path / "train_chats.jsonl", lines)
    write_json_lines(tmp_path / "validation_chats.jsonl", lines[1:4])
    train(load_config(compose(*overrides, "trainer.reinforce.max_steps=1")))
    (line,) = [line for line in metrics_of(tmp_path) if "train/rewards" in line]
    failed = [row for row in rollouts_of(tmp_path, 1) if row["reward"] is None]
    assert line["train/fraction_of_samples_scored"] == 1 - len(failed) / 12
    assert 0 < len(failed) < 12


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("environment.name=null", "config.environment.name.missing"),
        ("environment.name=calculator", "config.environment.name.no_dotted_name"),
        ("environment.max_episode_tokens=4", "config.max_episode_tokens.below_max_length"),
        ("environment.max_episode_tokens=128", "config.max_length.no_room_for_prompt"),
        (
            "trainer.reinforce.overlong_buffer=2",
            "config.environment.conflicts_with_overlong_buffer",
        ),
        (
            "model.data.sanitize_control_tokens=true",
            "config.environment.conflicts_with_sanitize_control_tokens",
        ),
        (
            "environment.turn_timeout_seconds=900",
            "config.turn_timeout_seconds.above_collective_timeout",
        ),
        ("rollout_order=finished", "config.environment.conflicts_with_rollout_order"),
    ],
)
def test_faults_of_the_configuration(override, key, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*episode_overrides(tmp_path, "odd_letters"), override))
    assert key in keys_of(raised.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["advantage_estimator=grpo"], "config.advantage_estimator.conflicts_with_turn_credit"),
        (["kl_placement=advantage"], "config.kl_placement.conflicts_with_turn_credit"),
        (["kl_reduction=mean"], "config.kl_placement.conflicts_with_turn_credit"),
        (["importance_ratio=sequence"], "config.importance_ratio.conflicts_with_turn_credit"),
        (["reward_shaping.scale=2"], "config.reward_shaping.conflicts_with_turn_credit"),
        (
            ["reward_shaping.standardization=running"],
            "config.reward_shaping.conflicts_with_turn_credit",
        ),
        (["discount_factor=0.9"], "config.discount_factor.without_token_credit"),
    ],
)
def test_what_credit_by_turn_needs(overrides, key, tmp_path):
    overrides = [f"trainer.reinforce.{text}" for text in ["credit_assignment=turn", *overrides]]
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*episode_overrides(tmp_path, "odd_letters", *overrides)))
    assert keys_of(raised.value) == [key]


def test_credit_by_turn_needs_an_environments_rewards(tmp_path):
    function = ("reward=function", f"reward_function.name={ENVIRONMENTS}.parity_reward")
    overrides = (*function, "trainer.reinforce.credit_assignment=turn")
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*episode_overrides(tmp_path, "odd_letters", *overrides)))
    assert keys_of(raised.value) == ["config.credit_assignment.turn_without_environment"]


def test_a_run_with_credit_by_turn(tmp_path):
    run(tmp_path, "odd_letters", "trainer.reinforce.credit_assignment=turn")
    path = rollout_files(tmp_path / "run")[2]
    pairs = list(zip(read_rows(path), read_tokens(path), strict=True))
    several = 0
    for row, sample in pairs:
        of_policy = list(
            itertools.compress(sample.token_advantages or [], sample.policy_mask or [])
        )
        several += len(set(of_policy)) > 1
        if row.valid:
            assert sum(sample.turn_rewards or []) == pytest.approx(row.reward)
    assert several


def test_settings_without_a_name(tmp_path):
    plain = episode_overrides(tmp_path, "", "environment.max_turns=2")
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*plain))
    assert "config.environment.without_name" in keys_of(raised.value)


def test_a_plain_prompt_has_no_turns(tmp_path):
    overrides = episode_overrides(tmp_path, "odd_letters")
    write_json_lines(tmp_path / "train_chats.jsonl", [{"text": "hi"}])
    with pytest.raises(DataError) as raised:
        train(load_config(compose(*overrides)))
    assert raised.value.key == "data.prompt.no_conversation"


def test_an_environment_that_cannot_be_loaded_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError) as raised:
        run(tmp_path, "nothing")
    assert "environment.name.not_usable" in keys_of(raised.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
