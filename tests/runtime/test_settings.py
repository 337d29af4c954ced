"""Resuming with other settings, and starting a finished run: what is refused, shown and kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.errors import raises_error
from helpers.tiny_run import (
    compose,
    metrics_of,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    write_prompts,
)
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.trainer_processes import TrainerProcesses
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.evaluation.model import inference_config
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.runtime import settings as run_settings
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.run_lock import LOCK_FILE
from reinforce_rl.runtime.settings import (
    check_changes,
    compare,
    freeze_template_date,
    may_start,
    record,
)
from reinforce_rl.runtime.status import Status, StatusFile, read_status
from reinforce_rl.runtime.stop import StopRequest

RL = "trainer.reinforce"
SCRIPT = Path(__file__).parents[2] / "examples" / "train_reinforce_actor.py"
TWO_STEPS = f"{RL}.max_steps=2"
MORE = (f"{RL}.max_epochs=3", f"{RL}.max_steps=4")


@pytest.fixture
def begun(tmp_path, mesh) -> Path:
    """A run stopped after two of its six steps."""
    run(tmp_path, mesh, f"{RL}.max_epochs=3", TWO_STEPS)
    return tmp_path


@pytest.fixture
def set_today(monkeypatch):
    """Set the date that a start reads."""

    def set_day(day: str) -> None:
        stopped = type(
            "Stopped", (date,), {"today": classmethod(lambda cls: date.fromisoformat(day))}
        )
        monkeypatch.setattr("reinforce_rl.config.template.date", stopped)

    return set_day


class TestDateOfTemplates:
    OVERRIDES = (f"{RL}.max_epochs=3", "model.data.apply_chat_template=true")

    def write_tokenizer(self, folder: Path, template: str) -> None:
        tiny_overrides(folder)
        write_tiny_tokenizer(folder / "model", vocab_size=32, chat_template=template)

    @pytest.mark.more
    def test_a_resume_on_the_next_day_goes_on_with_the_first_days_prompts(
        self, tmp_path, mesh, set_today
    ):
        self.write_tokenizer(
            tmp_path, "{{ strftime_now('%a') }}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        set_today("2024-02-05")
        run(tmp_path, mesh, *self.OVERRIDES, TWO_STEPS)
        assert config_yaml(tmp_path).model.data.chat_template_date == "2024-02-05"
        set_today("2024-02-06")
        lines = run(tmp_path, mesh, *self.OVERRIDES, f"{RL}.max_steps=4")
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert config_yaml(tmp_path).model.data.chat_template_date == "2024-02-05"
        assert [line["step"] for line in history(tmp_path)] == [0, 2]
        prompts = {row["prompt"] for step in (1, 4) for row in rollouts_of(tmp_path, step)}
        assert {prompt[:3] for prompt in prompts} == {"Mon"}
        # The same command detects the run's end; an evaluation and a generator, like the run,
        # use its date.
        again = tiny_config(tmp_path, *self.OVERRIDES, f"{RL}.max_steps=4")
        freeze_template_date(again)
        assert check_changes(again) == {}
        joining = tiny_config(tmp_path, *self.OVERRIDES)
        freeze_template_date(joining, joins=True)
        assert joining.model.data.chat_template_date == "2024-02-05"
        like = inference_config(
            tmp_path / "model", like=tmp_path / "run", folder=tmp_path / "eval", trust=True
        )
        assert like.model.data.chat_template_date == "2024-02-05"

    @pytest.mark.more
    def test_another_date_is_another_run(self, tmp_path, mesh, set_today):
        self.write_tokenizer(
            tmp_path, "{{ strftime_now('%a') }}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        set_today("2024-02-05")
        run(tmp_path, mesh, *self.OVERRIDES, TWO_STEPS)
        change = 'chat_template_date: "2024-02-05" -> "2024-02-07"'
        with raises_error("run.resume.other_settings", change):
            run(tmp_path, mesh, *self.OVERRIDES, "model.data.chat_template_date=2024-02-07")

    def test_a_template_without_a_date_has_none_in_its_settings(self, tmp_path, set_today):
        self.write_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
        set_today("2024-02-05")
        cfg = tiny_config(tmp_path, *self.OVERRIDES)
        freeze_template_date(cfg)
        assert cfg.model.data.chat_template_date is None


def history(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "run" / "config_history.jsonl").read_text().splitlines()
    ]


def config_yaml(folder: Path):
    return OmegaConf.load(folder / "run" / "config.yaml")


@pytest.mark.more
class TestOtherSettings:
    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("algorithm=grpo", 'advantage_estimator: "rloo" -> "grpo"'),
            (f"{RL}.num_rollouts_per_prompt=2", "num_rollouts_per_prompt: 4 -> 2"),
            (f"{RL}.initial_policy_kl_penalty=0.7", "initial_policy_kl_penalty: 0.1 -> 0.7"),
            (f"{RL}.reward_shaping.scale=2", "reward_shaping.scale: 1.0 -> 2.0"),
            ("model.reinforce.num_rollout_samples=2", "num_rollout_samples: 4 -> 2"),
            ("model.reinforce.sampling_params.temperature=2.0", "temperature: 1.0 -> 2.0"),
            ("model.reinforce.length_params.max_length=4", "max_length: 5 -> 4"),
            ("model.seed=7", "model.seed: 1234 -> 7"),
        ],
    )
    def test_what_changes_the_meaning_is_refused_and_nothing_is_overwritten(
        self, begun, mesh, override, said
    ):
        files = [
            begun / "run" / name
            for name in ("config.yaml", "metrics.jsonl", "config_history.jsonl")
        ]
        before = [path.read_bytes() for path in files]
        named = (said, "resume_with_changes=true", "step 2")
        with raises_error("run.resume.other_settings", *named):
            run(begun, mesh, *MORE, override)
        assert [path.read_bytes() for path in files] == before

    def test_other_data_and_another_model_are_refused(self, begun, mesh):
        other = write_prompts(begun / "other.jsonl", three_letters(8))
        with raises_error("run.resume.other_settings", "data_prefix.train"):
            run(begun, mesh, *MORE, f"model.data.data_prefix.train={other}")
        (begun / "model").rename(begun / "elsewhere")
        with raises_error("run.resume.other_settings", "restore_from_path"):
            run(
                begun, mesh, *MORE, f"pretrained_checkpoint.restore_from_path={begun / 'elsewhere'}"
            )

    def test_with_leave_it_goes_on_and_the_history_and_the_report_say_so(self, begun, mesh, capfd):
        lines = run(
            begun, mesh, *MORE, f"{RL}.num_rollouts_per_prompt=2", "resume_with_changes=true"
        )
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert "num_rollouts_per_prompt: 4 -> 2" in capfd.readouterr().out
        settings = [
            (line["step"], OmegaConf.create(line["config"]).trainer.reinforce)
            for line in history(begun)
        ]
        assert [(step, rl.num_rollouts_per_prompt) for step, rl in settings] == [(0, 4), (2, 2)]
        page = write_report(begun / "run").read_text()
        assert "after step 2" in page
        assert "num_rollouts_per_prompt: 4 -> 2" in page
        # These are now the run's settings: the same command needs no permission, and the first ones
        # would.
        raised = f"{RL}.max_steps=5"
        check_changes(tiny_config(begun, *MORE, raised, f"{RL}.num_rollouts_per_prompt=2"))
        with raises_error("run.resume.other_settings", "num_rollouts_per_prompt: 2 -> 4"):
            check_changes(tiny_config(begun, *MORE, raised))

    def test_what_changes_how_it_is_done_is_shown(self, begun, mesh, capfd):
        lines = run(begun, mesh, *MORE, "model.optim.lr=0.5", "model.micro_batch_size=4")
        assert len(lines) == 4
        said = capfd.readouterr().out
        assert "model.optim.lr: 0.01 -> 0.5" in said
        assert "model.micro_batch_size: 5 -> 4" in said
        assert "max_steps: 2 -> 4" in said
        assert [line["step"] for line in history(begun)] == [0, 2]
        assert config_yaml(begun).model.optim.lr == 0.5

    def test_nothing_is_said_of_the_same_settings_and_of_where_the_server_is(
        self, begun, mesh, capfd
    ):
        run(begun, mesh, f"{RL}.max_epochs=3", TWO_STEPS, "remote_rm.reward_model.port=5999")
        said = capfd.readouterr().out
        assert "->" not in said
        assert len(history(begun)) == 1

    def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_what_it_lacks(
        self, begun, mesh
    ):
        (begun / "run" / "config_history.jsonl").unlink()
        old = config_yaml(begun)
        del old.trainer.reinforce["credit_assignment"]
        del old["resume_with_changes"]
        old["removed_key"] = 1
        OmegaConf.save(old, begun / "run" / "config.yaml")
        change = 'credit_assignment: "sequence" -> "token"'
        with raises_error("run.resume.other_settings", change):
            run(begun, mesh, *MORE, f"{RL}.credit_assignment=token")
        assert len(run(begun, mesh, *MORE)) == 4
        assert [line["step"] for line in history(begun)] == [0, 2]
        assert "removed_key" in history(begun)[0]["config"]

    def test_what_a_start_did_that_made_no_step_is_forgotten(self, begun):
        """A rank that asks after the first rank has recorded gets the same answer as before."""
        changed = tiny_config(
            begun, *MORE, f"{RL}.num_rollouts_per_prompt=2", "resume_with_changes=true"
        )
        expected = check_changes(changed)
        record(changed)
        assert check_changes(changed) == expected != {}
        plain = tiny_config(begun, *MORE)
        assert check_changes(plain) == {f"{RL}.max_steps": "2 -> 4"}
        record(plain)
        assert [line["step"] for line in history(begun)] == [0, 2]
        assert "num_rollouts_per_prompt: 4" in history(begun)[1]["config"]

    def test_going_back_to_an_older_checkpoint_goes_back_to_its_settings(self, begun, mesh):
        run(begun, mesh, *MORE, "model.optim.lr=0.5")
        (begun / "run" / "checkpoints" / "latest").write_text("step_00000002")
        assert (
            check_changes(tiny_config(begun, "model.optim.lr=0.5"))["model.optim.lr"]
            == "0.01 -> 0.5"
        )

    def test_a_new_run_in_the_same_folder_is_refused_without_a_trace(self, begun, mesh):
        before = (begun / "run" / "config.yaml").read_bytes()
        with raises_error("metrics.file.of_another_run", begun / "run" / "metrics.jsonl"):
            run(begun, mesh, "exp_manager.resume_if_exists=false", "model.optim.lr=0.5")
        assert (begun / "run" / "config.yaml").read_bytes() == before


class TestRecordedSettings:
    """What a start records, compares and refuses to record."""

    def test_another_file_of_a_reward_function_is_reported(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "my_own.py").write_text(
            "def short(prompt, response, record):\n    return 1.0\n"
        )
        config = tiny_config(tmp_path, "reward=function", "reward_function.name=my_own.short")
        record(config)
        (tmp_path / "run" / "checkpoints").mkdir()
        (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000002")
        assert check_changes(config) == {}
        (tmp_path / "my_own.py").write_text(
            "def short(prompt, response, record):\n    return 2.0\n"
        )
        assert check_changes(config) == {"my_own.short": "its file was changed"}
        record(config)
        assert [line["step"] for line in history(tmp_path)] == [0, 2]
        notes = ["changed after step 2: my_own.short: its file was changed"]
        assert run_settings.settings_of(tmp_path / "run", 3)[1] == notes

    def test_what_the_next_start_could_not_read_is_refused_at_the_first(self, tmp_path):
        given = [
            "reward=function",
            "reward_function.name=reinforce_rl.rewards.functions.gsm8k",
            f"+reward_function.kwargs={{{'a' * 520}: 1}}",
        ]
        config = tiny_config(tmp_path, *given)
        for start in (check_changes, may_start, record):
            with raises_error("config.setting.not_storable", "kwargs.aaa", 500):
                start(config)
        assert not (tmp_path / "run").exists()

    @pytest.mark.more
    @pytest.mark.parametrize("bound", ["lines", "bytes"])
    def test_a_full_history_drops_old_lines_and_the_run_goes_on(self, tmp_path, monkeypatch, bound):
        latest = tmp_path / "run" / "checkpoints" / "latest"
        latest.parent.mkdir(parents=True)
        config = tiny_config(tmp_path)
        line = len(json.dumps(run_settings._line(config, 0)))
        if bound == "lines":
            monkeypatch.setattr(run_settings, "_MAX_HISTORY_LINES", 4)
        else:
            monkeypatch.setattr(run_settings, "_MAX_HISTORY_BYTES", line * 9 // 2)

        def start_at(step: int) -> None:
            latest.write_text(f"step_{step:08d}")
            config.model.optim.lr = 0.5 + step
            check_changes(config)
            record(config)

        for step in range(8):
            start_at(step)
        assert [line["step"] for line in history(tmp_path)] == [0, 5, 6, 7]

        def rate_of(step: int) -> float:
            text = run_settings.settings_of(tmp_path / "run", step)[0]
            return OmegaConf.create(text).model.optim.lr

        assert [rate_of(step) for step in (1, 6, 7, 8)] == [0.5, 5.5, 6.5, 7.5]
        for step in range(2, 6):
            with raises_error("history.settings.dropped", f"step {step}", "2 to 5"):
                rate_of(step)
        # Resumes from a checkpoint of the steps whose settings were dropped.
        start_at(3)
        assert [line["step"] for line in history(tmp_path)] == [0, 3]
        assert [rate_of(step) for step in (1, 4, 5)] == [0.5, 3.5, 3.5]
        with raises_error("history.settings.dropped", "2 to 3"):
            rate_of(3)

    def test_values_of_every_type_survive_the_file(self, tmp_path):
        given = [
            "reward=function",
            "reward_function.name=reinforce_rl.rewards.functions.gsm8k",
            "+reward_function.kwargs.numbers=[1,2.5,1e-7,null,true]",
            "+remote_rm.more_reward_models.safety.port=5556",
            'model.reinforce.sampling_params.end_strings=["Human:"]',
            "model.optim.lr=1e-6",
        ]
        config = load_config(compose(*tiny_overrides(tmp_path), *given))
        text = run_settings._line(config, 0)["config"]
        assert compare(text, text) == {}
        assert compare(text, text.replace("port: 5556", "port: 7")) == {}
        assert list(compare(text, text.replace("1.0e-07", "2.0e-07"))) == ["reward_function.kwargs"]

    def test_every_pattern_names_keys_that_there_are(self):
        keys = dict(run_settings.flatten(TrainConfig().model_dump()))
        alternatives = re.findall(
            r"[a-z_]{4,}", run_settings.MEANING.pattern + run_settings.SILENT.pattern
        )
        parts = {part for key in keys for part in key.split(".")}
        assert set(alternatives) - parts == set()


@pytest.mark.more
class TestFinished:
    @pytest.fixture(scope="class")
    def finished(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        processes = TrainerProcesses()
        try:
            settings = [
                f"{RL}.max_steps=2",
                "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
            ]
            processes.start(folder, *settings)
            assert processes.wait() == 0, (folder / "log").read_text()
        finally:
            processes.close()
        return folder

    def again(self, folder: Path, *overrides: str) -> tuple[int, str, float]:
        export = "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true"
        command = [
            *tiny_overrides(folder, num_prompts=10),
            export,
            "remote_rm.ready_timeout_seconds=1",
            *overrides,
        ]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *command], capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr, time.monotonic() - began

    @pytest.mark.parametrize(
        "overrides", [[TWO_STEPS], [f"{RL}.max_steps=1"], [TWO_STEPS, "trainer.devices=2"]]
    )
    def test_it_says_so_and_touches_nothing(self, finished, overrides):
        files = {
            path: path.stat().st_mtime_ns
            for path in (finished / "run").rglob("*")
            if path.is_file()
        }
        code, said, seconds = self.again(finished, *overrides)
        assert (code, said.count("\n")) == (0, 1), said
        assert "has finished, at step 2; raise trainer.reinforce.max_steps" in said
        assert seconds < 30, "imports of a busy machine; torch alone takes longer there"
        assert {
            p: p.stat().st_mtime_ns for p in (finished / "run").rglob("*") if p.is_file()
        } == files
        status = read_status(finished / "run")
        assert status is not None
        assert status.state == "finished"
        assert status.step == 2
        assert status.max_steps == 2

    def test_without_torch(self, finished):
        overrides = [*tiny_overrides(finished, num_prompts=10), TWO_STEPS]
        code = (
            "import sys\n"
            "from reinforce_rl.config.compose import compose\n"
            "from reinforce_rl.config.load import load_config\n"
            "from reinforce_rl.runtime.settings import may_start\n"
            f"assert not may_start(load_config(compose('train_reinforce_actor', {overrides!r})))\n"
            "assert 'torch' not in sys.modules or sys.modules['torch'].cuda.is_available()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    def test_what_is_left_to_do_is_done(self, finished, tmp_path, capsys):
        def starts(*overrides: str) -> bool:
            given = [*tiny_overrides(finished, num_prompts=10), *overrides]
            return may_start(load_config(compose(*given)))

        export = "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true"
        assert not starts(TWO_STEPS, export)
        capsys.readouterr()
        assert not starts(TWO_STEPS, export, "model.optim.lr=0.3"), "no step would have it"
        assert (
            "max_steps to continue, with model.optim.lr: 0.01 -> 0.3\n" in capsys.readouterr().out
        )
        with raises_error("run.resume.other_settings", "model.seed: 1234 -> 7"):
            starts(TWO_STEPS, export, "model.seed=7")
        assert starts(f"{RL}.max_steps=3", export)
        assert starts(f"{RL}.max_epochs=3", f"{RL}.max_steps=-1", export)
        (finished / "run" / "hf").rename(tmp_path / "hf")
        assert starts(TWO_STEPS, export)
        assert not starts(TWO_STEPS)
        (tmp_path / "hf").rename(finished / "run" / "hf")

    def test_an_older_checkpoint_goes_on(self, finished, tmp_path):
        latest = finished / "run" / "checkpoints" / "latest"
        name = latest.read_text()
        latest.write_text("step_00000001")
        try:
            assert may_start(
                load_config(compose(*tiny_overrides(finished, num_prompts=10), TWO_STEPS))
            )
        finally:
            latest.write_text(name)


@pytest.mark.more
def test_a_start_that_fails_leaves_the_step_in_the_status(begun, mesh):
    from reinforce_rl.runtime.status import StatusFile

    status = StatusFile(begun / "run", enabled=True)
    status._write(Status(state="stopped", step=2, max_steps=6))
    StatusFile(begun / "run", enabled=True).begin()
    restarted = read_status(begun / "run")
    assert restarted is not None
    assert restarted.state == "running"
    assert restarted.step == 2
    assert restarted.max_steps == 6
    assert metrics_of(begun)[-1]["step"] == 2


def files_of(run_folder: Path) -> dict[str, bytes]:
    contents = {
        str(path.relative_to(run_folder)): path.read_bytes()
        for path in run_folder.rglob("*")
        if path.is_file()
    }
    return {name: content for name, content in contents.items() if name != LOCK_FILE}


@pytest.mark.more
@pytest.mark.parametrize("is_late", [False, True])
def test_a_start_that_is_refused_changes_no_file_of_the_run(begun, mesh, monkeypatch, is_late):
    """Refused before the model is loaded, or by the component that is built last."""
    status = StatusFile(begun / "run", enabled=True)
    status._write(Status(state="stopped", step=2, max_steps=6))
    with (begun / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0}\n')  # the step was not saved
    before = files_of(begun / "run")
    changed = [f"{RL}.val_check_interval=1"]

    def refuse(*_: object) -> NoReturn:
        raise ConfigError(["this part does not fit"])

    monkeypatch.setattr(
        f"helpers.tiny_run.{'build_trainer' if is_late else 'build_datasets'}", refuse
    )
    changed.append("reward=function")
    changed.append("reward_function.name=reinforce_rl.rewards.functions.instructions")
    control = RunControl(begun / "run", StopRequest())
    with pytest.raises(ConfigError, match="this part does not fit"), control.running():
        run(begun, mesh, *MORE, *changed, "resume_with_changes=true")
    assert files_of(begun / "run") == before
