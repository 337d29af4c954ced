"""Other settings on stored rollouts, against real runs that resume with them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.errors import raises_error
from helpers.tiny_run import tiny_config, tiny_trainer
from rich.console import Console

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.debugging import recompute as module
from reinforce_rl.debugging.recompute import is_recomputed, recompute, write_page
from reinforce_rl.debugging.recompute_results import SampleChange, StepChange
from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.recorded import replay as command
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.monitoring import records
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.rewards.sources import connect_to_reward_servers

RL = "trainer.reinforce"
SHAPING = f"{RL}.reward_shaping"
FUNCTION = ["reward=function", "reward_function.name=helpers.reward_functions.share_of_letters"]


def train(
    folder: Path, name: str, *overrides: str, source: bool = False, base: str | None = None
) -> Path:
    """Train in `folder`/`name`, resuming from a copy of the run `base` if given."""
    path = folder / name
    if base is not None:
        shutil.copytree(folder / base, path)
    cfg = tiny_config(folder, f"exp_manager.explicit_log_dir={path}", *overrides)
    with parallel_mesh() as mesh:
        rm = {}
        if source:
            tokenizer = load_tokenizer(folder / "model")
            rm = {"rm": connect_to_reward_servers(cfg, mesh, tokenizer, SilentMonitor(folder))}
        try:
            with tiny_trainer(cfg, mesh, **rm) as trainer:
                trainer.fit()
        finally:
            for reward_model in rm.values():
                reward_model.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one step (`start`), and of a second step with equal settings (`mine`)."""
    folder = tmp_path_factory.mktemp("recompute")
    train(folder, "start", f"{RL}.max_steps=1", "model.optim.lr=0.05")
    train(folder, "mine", f"{RL}.max_steps=2", "model.optim.lr=0.05", base="start")
    return folder


def advantages(run: Path, step: int) -> list[float]:
    return [row.advantage for row in RunFolder(run).samples(step)]


def new_advantages(step: Any) -> list[float]:
    """Return the advantages with the changed settings."""
    return [sample.advantage[1] for sample in step.samples]


def test_a_record_gives_its_own_advantages(folder: Path) -> None:
    result = recompute(folder / "mine", "1:2")
    assert result.settings == {}
    assert result.largest_difference < 1e-6
    steps = [step.step for step in result.steps]
    assert steps == [1, 2]
    for step in result.steps:
        expected = advantages(folder / "mine", step.step)
        assert [sample.advantage[0] for sample in step.samples] == pytest.approx(expected)
        assert step.sign_changes == 0
        assert step.clipped == (0.0, 0.0)
        assert step.correlation == pytest.approx(1.0)
    kls = [row.kl for row in RunFolder(folder / "mine").samples(2)]
    assert any(abs(kl) > 0.01 for kl in kls), "or no placement is tested"


@pytest.mark.more
@pytest.mark.parametrize(
    "overrides",
    [
        [f"{RL}.advantage_estimator=grpo", f"{RL}.initial_policy_kl_penalty=0.01"],
        [f"{RL}.advantage_estimator=raft", f"{RL}.initial_policy_kl_penalty=0"],
        [f"{RL}.kl_placement=advantage", f"{RL}.kl_estimator=k2", f"{RL}.kl_reduction=mean"],
        [
            f"{RL}.credit_assignment=token",
            f"{RL}.discount_factor=0.9",
            f"{RL}.advantage_estimator=batch_mean",
        ],
        [
            f"{RL}.kl_placement=loss",
            f"{RL}.advantage_whitening=token",
            f"{RL}.truncated_samples=drop",
        ],
        [
            f"{SHAPING}.scale=3",
            f"{SHAPING}.clip=1.5",
            f"{SHAPING}.length_penalty=0.1",
            f"{RL}.truncated_samples=mask",
        ],
        [
            f"{RL}.truncated_samples=penalize",
            f"{RL}.truncation_penalty=0.5",
            f"{RL}.overlong_buffer=2",
        ],
    ],
    ids=lambda overrides: overrides[0].partition("=")[2],
)
def test_it_agrees_with_a_real_run_of_these_settings(
    folder: Path, overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "real"
    shutil.copytree(folder / "start", run)
    changes = ["resume_with_changes=true", f"{RL}.max_steps=2", "model.optim.lr=0.05"]
    train(folder, str(run), *changes, *overrides)
    result = recompute(folder / "mine", "2", overrides)
    real = RunFolder(run).samples(2)
    (step,) = result.steps
    expected = [sample.response for sample in step.samples]
    assert [row.response for row in real] == expected, "the rollouts are the same"
    expected = [row.advantage for row in real]
    assert new_advantages(step) == pytest.approx(expected, abs=1e-6)
    recomputed = [sample.advantage[0] for sample in step.samples]
    assert recomputed == pytest.approx(advantages(folder / "mine", 2), abs=1e-6)
    assert [sample.valid[1] for sample in step.samples] == [row.valid for row in real]
    expected = {override.partition("=")[0] for override in overrides}
    assert result.settings.keys() == expected
    assert step.correlation < 1 - 1e-6
    if f"{SHAPING}.clip=1.5" in overrides:
        clipped = sum(3 * row.reward > 1.5 for row in real)
        assert step.clipped == (0.0, clipped / len(real))
        assert step.clipped[1] > 0


@pytest.mark.parametrize(
    "overrides",
    [
        [
            f"{RL}.advantage_estimator=moving_average",
            f"{RL}.baseline_window=2",
            f"{SHAPING}.standardization=running",
        ],
        [
            f"{RL}.advantage_estimator=exponential_moving_average",
            f"{RL}.kl_target=0.1",
            f"{RL}.kl_horizon=50",
        ],
    ],
    ids=["moving_average", "exponential_moving_average"],
)
def test_a_state_comes_from_the_recorded_steps(overrides: list[str], tmp_path: Path) -> None:
    """With constant weights, both runs draw equal rollouts at every step."""
    still = [f"{RL}.max_epochs=2", "model.optim.lr=1e-30", "model.optim.weight_decay=0"]
    mine = train(tmp_path, "mine", *still)
    real = train(tmp_path, "real", *still, *overrides)
    (step,) = recompute(mine, "4", overrides).steps
    assert new_advantages(step) == pytest.approx(advantages(real, 4), abs=1e-6)
    original = [
        f"{RL}.advantage_estimator=rloo",
        f"{RL}.kl_target=null",
        f"{SHAPING}.standardization=none",
    ]
    (back,) = recompute(real, "4", original).steps
    assert new_advantages(back) == pytest.approx(advantages(mine, 4), abs=1e-6)
    (real / "rollouts" / "step_00002.parquet").unlink()
    with raises_error("replay.step.missing_before", real / "rollouts", "step 2"):
        recompute(real, "4")


@pytest.mark.parametrize(
    "changes",
    [
        [
            f"{RL}.advantage_estimator=running_mean",
            f"{SHAPING}.standardization=running",
            f"{RL}.kl_target=1",
        ],
        [f"{RL}.generator_log_probs=false"],
        [f"{RL}.reinforce_epochs=2", f"{RL}.importance_ratio=token"],
    ],
    ids=["state", "log-probs of a pass", "two updates"],
)
def test_a_record_of_a_run_resumed_with_other_settings(
    folder: Path, changes: list[str], tmp_path: Path
) -> None:
    shutil.copytree(folder / "start", tmp_path / "run")
    run = train(
        folder, str(tmp_path / "run"), f"{RL}.max_steps=2", "resume_with_changes=true", *changes
    )
    result = recompute(run, "1:2", [f"{RL}.advantage_estimator=none"])
    assert result.largest_difference < 1e-6
    recomputed = [sample.advantage[0] for sample in result.steps[1].samples]
    assert recomputed == pytest.approx(advantages(run, 2), abs=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        [
            f"{RL}.kl_placement=loss",
            f"{RL}.kl_loss_weights=token",
            f"{RL}.loss_aggregation=token_mean",
        ],
        [f"{RL}.advantage_estimator=grpo", f"{RL}.entropy_bonus=0.3"],
    ],
    ids=["loss", "grpo"],
)
def test_the_gradients_equal_real_updates(
    folder: Path, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = []
    for name, extra in (("own", []), ("other", [*overrides, "resume_with_changes=true"])):
        shutil.copytree(folder / "start", tmp_path / name)
        cfg = tiny_config(
            folder, f"exp_manager.explicit_log_dir={tmp_path / name}", f"{RL}.max_steps=2", *extra
        )
        with parallel_mesh() as mesh, tiny_trainer(cfg, mesh) as trainer:
            rollouts, *_ = trainer.generate_rollouts()
            batch, _ = trainer.generate_reinforce_data(rollouts)
            update = trainer.optimizer.step
            parameters = list(trainer.model.ddp.module.parameters())

            def step(parameters=parameters, update=update):
                # before it clips and applies the gradient
                gradients = [parameter.main_grad.detach().flatten() for parameter in parameters]
                real.append(torch.cat(gradients))
                return update()

            monkeypatch.setattr(trainer.optimizer, "step", step)
            trainer.run_training(batch)
    taken = []
    cosine = module.cosine

    def recorded_cosine(*pair):
        taken.append(pair)
        return cosine(*pair)

    monkeypatch.setattr(module, "cosine", recorded_cosine)
    result = recompute(folder / "mine", "2", overrides, phase="update")
    assert result.checkpoint == 1, "step 2 is an update of the weights after step 1"
    for mine, theirs in zip(taken[0], real, strict=True):
        assert module.cosine(mine, theirs) == pytest.approx(1.0, abs=5e-5)
        assert float((mine - theirs).norm()) < 1e-4 * float(theirs.norm())
    (step,) = result.steps
    assert step.cosine is not None
    assert step.cosine < 0.9999
    assert step.cosine == pytest.approx(module.cosine(*real), abs=5e-5)
    (same,) = recompute(folder / "mine", "1", phase="update").steps
    assert same.cosine == pytest.approx(1.0, abs=5e-5)


def test_other_rewards_equal_a_real_run(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "etaoinshr"[i : i + 2], "letters": "etaoinshr"[i % 4 :: 4]} for i in range(8)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [f"model.data.data_prefix.train={data}", f"{RL}.max_steps=1"]
    mine = train(folder, str(tmp_path / "mine"), *options)
    real = train(folder, str(tmp_path / "real"), *options, *FUNCTION, source=True)
    (step,) = recompute(mine, "1", FUNCTION).steps
    rows = RunFolder(real).samples(1)
    assert [sample.reward[1] for sample in step.samples] == [row.reward for row in rows]
    expected = [row.advantage for row in rows]
    assert new_advantages(step) == pytest.approx(expected, abs=1e-6)
    assert len({sample.reward[1] for sample in step.samples}) > 2
    assert step.sign_changes > 0


def test_a_function_that_only_the_folder_names_is_not_called(folder: Path) -> None:
    name = "reinforce_rl.rewards.functions.length"
    named_reward = [
        "reward=function",
        f"reward_function.name={name}",
        "+reward_function.kwargs={target: 5, tolerance: 5}",
    ]
    run = train(folder, "named", *named_reward, f"{RL}.max_steps=1", source=True)
    other = ["reward_function.kwargs.target=2"]
    with raises_error(
        "trust.setting.only_of_folder", f"reward_function.name is '{name}'", "--trust"
    ):
        recompute(run, "1", other)
    said: list[str] = []
    assert recompute(run, "1", other, trust=True, say=said.append).steps[0].samples
    assert [name in said[0], "target" in said[1]] == [True, True]


MISTAKES = [
    ("3", [], "samples.step.missing", ["rollouts", "step 3", "1 to 2"]),
    ("2:1", [], "replay.step.backwards", ["--step", "'2:1'"]),
    ("two", [], "replay.step.invalid", ["--step", "'two'"]),
    ("2", ["model.optim.lr=1"], "replay.setting.without_effect", ["model.optim.lr"]),
    (
        "2",
        [f"{RL}.advantage_estimatr=grpo"],
        "config.key.unknown",
        [f"{RL}.advantage_estimatr", f"{RL}.advantage_estimator"],
    ),
    (
        "2",
        ["reward=function", "reward_function.name=nowhere.f"],
        "reward_function.module.missing",
        ["nowhere"],
    ),
]


@pytest.mark.parametrize(
    ("steps", "overrides", "key", "named"), MISTAKES, ids=[key for _, _, key, _ in MISTAKES]
)
def test_mistakes_give_clear_errors(
    folder: Path, steps: str, overrides: list[str], key: str, named: list[str]
) -> None:
    with raises_error(key, *named):
        recompute(folder / "mine", steps, overrides)


def test_all_faults_of_overrides_are_one_message(folder: Path) -> None:
    wrong = [
        f"{RL}.advantage_estimator=mine",
        f"{RL}.discount_factor=2",
        "model.seed=5",
        "trainer.devices=2",
    ]
    with pytest.raises(ConfigError) as error:
        recompute(folder / "mine", "2", wrong)
    expected = {override.partition("=")[0] for override in wrong}
    assert {fault.partition(" ")[0] for fault in error.value.faults} == expected


def test_a_missing_part_of_a_record_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_error("run.folder.no_run", tmp_path):
        recompute(tmp_path)
    bare = train(
        folder, str(tmp_path / "bare"), f"{RL}.max_steps=1", "exp_manager.record_tokens_every=0"
    )
    with raises_error("samples.tokens.not_recorded", "step 1", "KL"):
        recompute(bare)
    no_kl = [f"{RL}.max_steps=1", f"{RL}.initial_policy_kl_penalty=0"]
    plain = train(folder, str(tmp_path / "plain"), *no_kl, "exp_manager.record_tokens_every=0")
    assert recompute(plain, "1", [f"{RL}.advantage_estimator=grpo"]).steps[0].correlation > 0, (
        "without a KL no token is read"
    )
    tokens = train(folder, str(tmp_path / "tokens"), *no_kl)
    with raises_error("samples.tokens.no_reference_log_probs", f"{RL}.initial_policy_kl_penalty=0"):
        recompute(tokens, "1", [f"{RL}.initial_policy_kl_penalty=0.1"])
    (plain / "config.yaml").unlink()
    (plain / "config_history.jsonl").unlink()
    with raises_error("run.config.missing", plain, "config.yaml"):
        recompute(plain)
    version = records.VERSION
    monkeypatch.setattr(records, "VERSION", version + 1)
    with raises_error(
        "samples.file.other_version", f"version {version};", f"version {version + 1}."
    ):
        recompute(folder / "mine")


def test_a_changed_record_is_reported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mine", tmp_path / "run")
    for name in ("config.yaml", "config_history.jsonl"):
        path = tmp_path / "run" / name
        path.write_text(
            path.read_text().replace("advantage_estimator: rloo", "advantage_estimator: none")
        )
    with raises_error("replay.advantages.differ", "step 2") as caught:
        recompute(tmp_path / "run")
    assert re.search(r"prompt \d+, sample \d", str(caught.value))


def test_table_json_and_page(folder: Path, tmp_path: Path) -> None:
    result = recompute(folder / "mine", "1:2", [f"{RL}.advantage_estimator=none"])
    write_page(result, folder / "mine", tmp_path / "out.html")
    read = json.loads(json.dumps(result.as_json()))
    expected = {f"{RL}.advantage_estimator": ["rloo", "none"]}
    assert read["settings"] == expected
    steps = [step["step"] for step in read["steps"]]
    assert steps == [1, 2]
    assert len(read["samples"]) == 32
    both = [sample["advantage"] for sample in read["samples"] if sample["step"] == 2]
    assert [before for before, _ in both] == pytest.approx(advantages(folder / "mine", 2))
    sign_changes = sum(before * after < 0 for before, after in both)
    assert read["steps"][1]["sign_changes"] == sign_changes > 0
    expected = torch.corrcoef(torch.tensor(both).T.double())[0, 1]
    assert read["steps"][1]["correlation"] == pytest.approx(float(expected), abs=1e-6)
    console = Console(width=160, record=True, file=(tmp_path / "table").open("w"))
    console.print(result.table())
    text = console.export_text()
    assert f'{RL}.advantage_estimator: "rloo" -> "none"' in text
    assert "sign changes" in text
    page = (tmp_path / "out.html").read_text()
    assert "Advantages in order of size" in page
    assert "Samples whose advantage changes sign" in page


def test_a_step_without_spread_has_no_correlation() -> None:
    assert math.isnan(module.correlation(torch.zeros(4), torch.arange(4.0)))
    assert math.isnan(module.cosine(torch.zeros(4), torch.ones(4)))
    flat = SampleChange(1, 0, 0, "", (True, True), (0.0, 0.0), (0.0, 1e-9))
    assert not flat.changes_sign
    assert SampleChange(1, 0, 0, "", (True, True), (0.0, 0.0), (-0.5, 0.5)).changes_sign
    assert StepChange(1, [flat], 0, math.nan, *[(0.0, 0.0)] * 4).cosine is None


def test_a_setting_of_the_loss_compares_the_gradients(folder: Path) -> None:
    (step,) = recompute(folder / "mine", "2", [f"{RL}.entropy_bonus=0.3"]).steps
    assert step.cosine is not None
    assert step.cosine < 0.9999
    assert step.sign_changes == 0


def test_a_phase_that_needs_one_step_is_refused(folder: Path) -> None:
    with raises_error("replay.phase.of_one_step", "'logprobs'", "all, advantages, update"):
        recompute(folder / "mine", "1:2", phase="logprobs")


@pytest.mark.more
@pytest.mark.parametrize(
    ("steps", "overrides", "expected"),
    [
        (None, [], False),
        ("2", [], False),
        ("1:2", [], True),
        ("1:", [], True),
        ("2", [f"{RL}.advantage_estimator=grpo"], True),
        ("2", [f"{RL}.entropy_bonus=0.3"], True),
        (None, FUNCTION, True),
        ("2", [f"{RL}.advantage_estimator=rloo"], False),  # as recorded
        ("2", ["reward_function.sample_timeout_seconds=9"], False),
        ("2", ["remote_rm.deadline_seconds=9", "remote_rm.reward_model.port=9"], False),
        ("2", ["reward_function.weight=2"], True),
        ("2", ["trainer.devices=2"], False),
        ("2", ["trainer.devices=2", f"{RL}.advantage_estimator=grpo"], True),
    ],
)
def test_which_replays_are_computed_on_stored_rollouts(
    folder: Path, steps: str | None, overrides: list[str], expected: bool
) -> None:
    assert is_recomputed(folder / "mine", steps, overrides) is expected


def test_a_model_that_is_elsewhere_now_may_be_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "moved")
    overrides = [
        f"pretrained_checkpoint.restore_from_path={tmp_path / 'moved'}",
        f"{RL}.entropy_bonus=0.3",
    ]
    (moved,) = recompute(folder / "mine", "2", overrides).steps
    (step,) = recompute(folder / "mine", "2", overrides[1:]).steps
    assert moved.cosine == step.cosine


def test_with_a_reward_source_named_a_step_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def replay(run: Path, step: int | None, **options: Any) -> Any:
        asked.append((run, step, options["reward"], options["overrides"]))
        raise typer.Exit(7)

    monkeypatch.setattr("reinforce_rl.debugging.replay.replay", replay)
    overrides = [*FUNCTION, "reward_function.sandbox=false"]
    with pytest.raises(typer.Exit):
        command(folder / "mine", overrides, step="2", reward="restart")
    assert asked == [(folder / "mine", 2, "restart", overrides)]


def test_settings_of_the_loss_have_no_effect_on_advantages_alone(folder: Path) -> None:
    with raises_error("replay.setting.gradient_only", f"{RL}.entropy_bonus", "advantages"):
        recompute(folder / "mine", "2", [f"{RL}.entropy_bonus=0.3"], phase="advantages")


def test_a_data_set_that_only_the_folder_names_is_not_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "mine", tmp_path / "run")
    data = str(folder / "train.jsonl")
    for name in ("config.yaml", "config_history.jsonl"):
        path = tmp_path / "run" / name
        assert data in path.read_text()
        path.write_text(path.read_text().replace(data, "hf:owner/secret"))
    with raises_error("trust.setting.only_of_folder", "hf:owner/secret", "--trust"):
        recompute(tmp_path / "run", "2", FUNCTION)
    given = f"model.data.data_prefix.train={data}"
    (step,) = recompute(tmp_path / "run", "2", [*FUNCTION, given]).steps
    assert len(step.samples) > 0


def test_the_command_writes_its_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"{RL}.advantage_estimator=none"]
    with pytest.raises(typer.Exit) as ended:
        command(
            folder / "mine",
            overrides,
            step="1:2",
            json=tmp_path / "out.json",
            html=tmp_path / "out.html",
        )
    assert ended.value.exit_code == 0
    written = json.loads((tmp_path / "out.json").read_text())
    steps = [step["step"] for step in written["steps"]]
    assert steps == [1, 2]
    assert "Advantages in order of size" in (tmp_path / "out.html").read_text()
    assert '"rloo" -> "none"' in capsys.readouterr().out


WRONG_OPTIONS: list[tuple[list[str], dict[str, Any], str, list[str]]] = [
    (
        [],
        {"step": "2", "html": Path("out.html")},
        "replay.option.without_effect",
        ["--html", "out.html"],
    ),
    (
        [],
        {"step": "1:2", "reward": "stored"},
        "replay.option.without_effect",
        ["--reward", "stored"],
    ),
    ([], {"step": "two"}, "replay.step.invalid", ["--step", "'two'"]),
    ([f"{RL}.entropy_bonus=1"], {"step": "two"}, "replay.step.invalid", ["--step", "'two'"]),
    (
        [f"{RL}.entropy_bonus=1"],
        {"phase": "score"},
        "replay.phase.of_one_step",
        ["--phase", "'score'"],
    ),
]


@pytest.mark.parametrize(("overrides", "options", "key", "named"), WRONG_OPTIONS)
def test_options_of_the_other_way_are_refused(
    folder: Path, overrides: list[str], options: dict[str, Any], key: str, named: list[str]
) -> None:
    with raises_error(key, *named):
        command(folder / "mine", overrides, **options)
