"""submit.py as a user runs it, with fakes of Slurm's commands."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.errors import check_fault, printed_keys
from helpers.models import tiny_llama_folder
from helpers.slurm_client import SlurmClient
from helpers.tiny_run import three_letters, write_prompts

from reinforce_rl.launch.slurm.options import ComponentOptions, parse_options
from reinforce_rl.launch.slurm.outcome import Attempt, write_attempt
from reinforce_rl.launch.slurm.plan import Component, JobPlan
from reinforce_rl.launch.slurm.script import SETTINGS
from reinforce_rl.launch.slurm.settings import Settings
from reinforce_rl.launch.slurm.submit import Answer, Start, ask_cluster, main, partition_faults
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.slurm_commands import SlurmCallError

ROOT = Path(__file__).parents[3]
SINFO = "batch*|up|infinite\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=64
    )
    write_prompts(folder / "train.jsonl", three_letters(8))
    (folder / "head.safetensors").touch()
    return folder


class Submit:
    """submit.py, with a valid configuration by default."""

    def __init__(self, files: Path, folder: Path, slurm: SlurmClient):
        self.run_dir = folder / "run"
        self.slurm = slurm
        self.right_actor = [
            f"pretrained_checkpoint.restore_from_path={files / 'model'}",
            f"model.data.data_prefix.train={files / 'train.jsonl'}",
            f"exp_manager.explicit_log_dir={self.run_dir}",
            "model.encoder_seq_length=64",
            "model.reinforce.length_params.max_length=16",
        ]
        self.right_server = [
            f"reward_model.restore_from_path={files / 'model'}",
            f"reward_model.head_path={files / 'head.safetensors'}",
        ]
        self.code = -1

    def __call__(self, *words: str, server: tuple[str, ...] = ()) -> str:
        """Return its output."""
        out = io.StringIO()
        console = Console(file=out, width=110, soft_wrap=True)
        self.code = main([*self.right_actor, *words, "--", *self.right_server, *server], console)
        return out.getvalue()


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> SlurmClient:
    client = SlurmClient(tmp_path / "slurm")
    client.answer("sinfo", SINFO)
    monkeypatch.setenv("PATH", client.path)
    return client


@pytest.fixture
def submit(files, tmp_path, slurm) -> Submit:
    return Submit(files, tmp_path, slurm)


def test_a_dry_run_prints_the_plan_and_makes_nothing(submit):
    text = submit(
        "--dry-run", "--chain=2", "--job-name=night", "trainer.devices=2", "trainer.num_nodes=2"
    )
    assert submit.code == 0
    for words in (
        "4 ranks: 4 data x 1 pipeline",  # from the trainer's plan
        "night-rm                   night-actor",
        "nodes        1                          2",
        "1 x 1 = 1                  2 x 2 = 4",
        "300 s before the limit",
        "2, each starting after the previous one ends",
        "2026-01-02T03:04:05 on n0,n1",
        "sbatch --parsable --signal=B:USR1@300 --time=04:00:00",
        "No fault was found. Nothing was submitted.",
    ):
        assert words in text, text
    assert "--gpus" not in text.partition("Command")[2]
    assert submit.slurm.submissions() == []
    assert not submit.run_dir.exists()


def test_separate_generators_are_a_third_component(submit):
    apart = ("placement=disaggregated", "generation_tensor_parallel_size=2")
    text = submit(
        "--dry-run", "--job-name=night", "--generator-nodes=2", "--generator-devices=4", *apart
    )
    assert submit.code == 0, text
    for words in ("night-gen", "2 x 4 = 8", "2: generators", "generator_ranks"):
        assert words in text, text
    command = " ".join(text.partition("Command")[2].replace("\\", " ").split())
    assert command.count(" : ") == 2
    assert "--job-name=night-gen --nodes=2 --ntasks-per-node=4" in command
    text = submit("--dry-run", "--generator-devices=3", *apart)
    assert submit.code == 1
    assert printed_keys(text) == ["slurm.generators.not_a_multiple"]
    assert "--generator-devices is 3" in text
    assert "generation_tensor_parallel_size is 2" in text


def test_every_fault_is_in_one_message(submit):
    (submit.run_dir / "slurm").mkdir(parents=True)
    line = {"job": "7", "name": "reinforce-rm", "time": 1.0}
    (submit.run_dir / "slurm" / "submitted.jsonl").write_text(json.dumps(line) + "\n")
    submit.slurm.answer("squeue", "7+0|7|PENDING|reinforce-rm\n7+1|8|PENDING|reinforce-actor\n")
    text = submit(
        "--time=30:00",
        "--signal-lead=1800",
        "--chain=0",
        "--actor-gpus=h100:1",
        "--mem=much",
        "--max-restarts=never",
        "--server-cpus-per-task=few",
        "trainer.devices=2",
        "trainer.reinforce.num_rollouts_per_prompt=1",
        "exp_manager.resume_if_exists=false",
        "remote_rm.reward_model.name=other",
        server=("devices=0", "reward_model.head_path=nowhere"),
    )
    assert submit.code == 1
    keys = printed_keys(text)
    for key, *values in (
        ("slurm.signal_lead.no_time_to_train", "--signal-lead is 1800 s", "--time is 1800 s"),
        ("slurm.option.invalid", "--chain is '0'"),
        ("slurm.option.invalid", "--actor-mem is 'much'; expected SIZE[K|M|G|T]"),
        ("slurm.option.invalid", "--server-mem is 'much'; expected SIZE[K|M|G|T]"),
        ("slurm.option.invalid", "--server-cpus-per-task is 'few'"),
        ("slurm.gpus.too_few", "--actor-gpus is h100:1", "2 ranks"),
        ("slurm.variable.invalid", "REINFORCE_MAX_RESTARTS is 'never'"),
        ("slurm.resume.off", "exp_manager.resume_if_exists is false"),
        (
            "slurm.servers.other_name",
            "remote_rm.reward_model.name is other",
            "inference.name is reward_model",
        ),
        ("slurm.queue.same_run", "7 (reinforce-rm, pending)", "(scancel 7)"),
    ):
        assert key in keys, (key, text)
        for value in values:
            assert text.count(value) == 1, (value, text)
    for key, value in (
        ("config.num_rollouts_per_prompt.too_small_for_estimator", "num_rollouts_per_prompt is 1"),
        ("config.value.out_of_range", "devices is 0"),
        ("config.head_path.no_file", "head_path: nowhere"),
    ):
        assert key in keys, (key, text)
        assert text.count(value) == 1, (value, text)
    assert submit.slurm.submissions() == []

    submit.slurm.answer("squeue")
    second_text = submit("--max-restarts=never", "--time=1:00:00", "trainer.num_nodes=5")
    assert printed_keys(second_text) == ["slurm.variable.invalid", "slurm.sbatch.refuses"]
    assert "REINFORCE_MAX_RESTARTS" in second_text
    assert "the actor (--nodes=5 --ntasks" in second_text


def test_keys_that_the_job_sets_itself(submit):
    text = submit(
        "remote_rm.reward_model.ip=rm-node", "preflight=true", server=("inference.port=5555",)
    )
    keys = printed_keys(text)
    assert keys.count("slurm.argument.set_by_job") == 2
    assert "slurm.preflight.in_a_job" in keys
    assert "remote_rm.reward_model.ip is given among the actor's" in text
    assert "inference.port is given among the server's" in text
    assert "preflight is true" in text


def test_an_unknown_key_of_either_side(submit):
    text = submit("trainer.devces=2", server=("devces=2",))
    assert printed_keys(text).count("config.key.unknown") == 2
    for key in ("trainer.devces", " devces", "trainer.devices", " devices"):
        assert key in text


def test_a_chain(submit, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # an allocation in which a user may call this
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("REINFORCE_MPI", "pmix")
    monkeypatch.setenv("REINFORCE_MAX_RESTARTS", "3")
    text = submit("--chain=3", "--servers=2", "--partition=batch", "trainer.devices=2")
    assert submit.code == 0, text
    assert "Submitted: 100 then 101 then 102" in text
    assert "scancel 100 101 102" in text
    first, second, third = submit.slurm.submissions()
    assert not [word for word in first if word.startswith("--dependency")]
    assert second == [first[0], first[1], "--dependency=afterany:100", *first[2:]]
    assert third == [first[0], first[1], "--dependency=afterany:101", *first[2:]]
    assert f"--output={submit.run_dir}/slurm/%j.out" in first
    assert (submit.run_dir / "slurm").is_dir()
    split = first.index(":")
    assert [word for word in first[:split] if word.startswith("--nodes")] == ["--nodes=2"]
    assert [word for word in first[split:] if word.startswith("--ntasks")] == [
        "--ntasks-per-node=2"
    ]
    script = submit.run_dir / "slurm" / "train_hetjob.sbatch"
    overrides = first[first.index(str(script)) + 1 :]
    assert overrides[-3:] == ["--", *submit.right_server]
    # set by the job itself
    assert not [word for word in overrides if word.startswith("exp_manager.explicit_log_dir")]

    job_environment = submit.slurm.environment(102)
    expected = {
        "REINFORCE_RUN_DIR": str(submit.run_dir),
        "REINFORCE_MAX_RESTARTS": "3",
        "SLURM_CONF": "/etc/slurm.conf",
    }
    assert {name: job_environment.get(name) for name in expected} == expected
    # variables that the script was given are not variables of the job
    assert not {"SLURM_JOB_ID", "REINFORCE_MPI"} & job_environment.keys()
    assert "--unset=REINFORCE_MAX_RESTARTS --unset=REINFORCE_MPI REINFORCE_RUN_DIR=" in text
    lines = script.read_text().splitlines()
    assignments = (line.partition("#")[0].partition("=") for line in lines)
    settings = {name: value.strip() for name, _, value in assignments if name in SETTINGS}
    assert settings["repository"] == str(ROOT)
    assert settings["python"] == settings["batch_python"] == sys.executable
    assert (settings["servers"], settings["srun_options"]) == ("2", "(--mpi=pmix)")
    lines = (submit.run_dir / "slurm" / "submitted.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["100", "101", "102"]


def test_a_run_that_is_in_the_queue_is_not_submitted_again(submit):
    submit("--chain=2")
    submit.slurm.answer("squeue", "101+0|101|PENDING|reinforce-rm\n")
    text = submit()
    assert submit.code == 1
    assert printed_keys(text) == ["slurm.queue.same_run"]
    assert "101 (reinforce-rm, pending)" in text
    assert submit.slurm.calls("squeue")[-1][1] == "--jobs=100,101"
    for answer in (
        {"text": ""},
        {"text": "101|101|RUNNING|another\n"},  # its job id was reused
        {"error": "slurm_load_jobs error: Invalid job id specified", "code": 1},
    ):
        submit.slurm.answer("squeue", **answer)
        assert "Submitted: " in submit()


def test_a_job_that_was_submitted_by_hand_counts_too(submit):
    write_attempt(submit.run_dir / "slurm", Attempt("55", 0, 1.0, 0))
    submit.slurm.answer("squeue", "55+0|55|RUNNING|mine\n")
    text = submit()
    assert printed_keys(text) == ["slurm.queue.same_run"]
    assert "55 (mine, running)" in text
    write_attempt(submit.run_dir / "slurm", Attempt("55", 0, 1.0, 0, end=2.0, exit_code=1))
    assert "Submitted: 100" in submit()


def test_a_finished_run_is_reported(submit):
    submit.run_dir.mkdir()
    (submit.run_dir / "status.json").write_text(json.dumps({"state": "finished", "step": 12}))
    text = submit()
    assert submit.code == 0
    assert f"the run in {submit.run_dir} has finished, at step 12. Nothing was submitted." in text
    assert submit.slurm.submissions() == []
    arguments = (("trainer.reinforce.max_steps=12",), ())
    # it may be called again now
    attempt = Attempt(
        "55",
        0,
        1.0,
        0,
        arguments,
        end=2.0,
        exit_code=0,
    )
    write_attempt(submit.run_dir / "slurm", attempt)
    assert "Submitted: 100" in submit()


def test_without_slurm_there_is_a_plan_at_most(submit, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    text = submit("--dry-run")
    assert submit.code == 0
    assert "sbatch --parsable" in text
    assert "Not checked:\n  sbatch " in text
    assert "PATH" in text
    assert printed_keys(text) == []
    text = submit()
    assert submit.code == 1
    assert printed_keys(text) == ["slurm.command.missing"]
    assert not submit.run_dir.exists()


def test_a_controller_that_does_not_answer(submit):
    submit.slurm.answer(
        "sinfo", error="slurm_load_partitions: Unable to contact slurm controller", code=1
    )
    text = submit("--dry-run")
    assert submit.code == 0
    assert "Not checked:" in text
    assert "sinfo" in text
    assert "Unable to contact slurm controller" in text
    text = submit()
    assert submit.code == 1
    assert printed_keys(text) == ["slurm.partition.not_known"]


def test_a_refusal_of_sbatch_names_the_component(submit):
    submit.slurm.answer("test-reinforce-actor", error="allocation failure: Invalid\nqos", code=1)
    text = submit("--actor-qos=none")
    assert submit.code == 1
    component = "the component of the actor (--qos=none --nodes=1 --ntasks-per-node=1)"
    assert printed_keys(text) == ["slurm.sbatch.refuses"]
    assert f"{component}: allocation failure: Invalid qos" in text
    submit.slurm.answer("test-reinforce-actor")
    submit.slurm.answer("test", error="allocation failure: Invalid qos", code=1)
    text = submit()
    assert printed_keys(text) == ["slurm.sbatch.refuses"]
    assert "the job: allocation failure: Invalid qos" in text
    assert "Command" not in text


def test_a_variable_without_effect_is_refused(submit, monkeypatch):
    monkeypatch.setenv("REINFORCE_ACTOR_PARTITION", "batch")
    monkeypatch.setenv("REINFORCE_REWARD_TOKEN", "secret")
    assert "Submitted: 100" in submit()
    monkeypatch.setenv("REINFORCE_LAUNCHER", "torchrun")
    text = submit()
    assert printed_keys(text) == ["slurm.variable.not_read"]
    assert "REINFORCE_LAUNCHER" in text
    assert len(submit.slurm.submissions()) == 1


def test_an_edited_script_is_not_replaced_in_silence(submit):
    script = submit.run_dir / "slurm" / "train_hetjob.sbatch"
    text = submit("--dry-run")
    assert f"{script}, which the command reads" in text
    submit()
    assert f"{script} differs" not in submit("--dry-run")
    script.write_text(script.read_text() + "echo edited\n")
    assert f"{script} differs" in submit("--dry-run")
    assert script.read_text().endswith("echo edited\n")
    assert f"{script} differs" in submit()
    assert not script.read_text().endswith("echo edited\n")


def test_a_broken_chain_names_its_jobs(submit):
    submit.slurm.answer("sbatch-101", error="sbatch: error: too many jobs", code=1)
    text = submit("--chain=3")
    assert submit.code == 1
    assert printed_keys(text) == ["slurm.sbatch.failed"]
    assert "job 2 of 3: sbatch: error: too many jobs" in text
    assert "Submitted: 100\n" in text


def test_the_lead_follows_the_last_save(submit):
    submit.run_dir.mkdir()
    (submit.run_dir / "status.json").write_text(
        json.dumps({"state": "stopped", "save_seconds": 100.0})
    )
    assert "--signal=B:USR1@260 " in submit("--dry-run")
    text = submit("--dry-run", "--signal-lead=150")
    assert printed_keys(text) == ["slurm.signal_lead.shorter_than_save"]
    assert all(value in text for value in ("150 s", "100 s", "160 s"))


def test_gpus_memory_and_tasks(submit):
    text = submit(
        "--dry-run",
        "trainer.precision=bf16",
        "trainer.devices=4",
        "--cpus-per-task=3",
        "--mem=2G",
    )
    command = text.partition("Command")[2]
    assert submit.code == 0, text
    assert command.count("--mem=2G") == 2
    assert "--ntasks-per-node=4 --cpus-per-task=3 --gpus-per-node=4" in command
    assert "--ntasks-per-node=1 --cpus-per-task=3 --gpus-per-node=1" in command
    none = submit("--dry-run", "trainer.precision=bf16", "--gpus-per-node=0").partition("Command")[
        2
    ]
    assert "--gpus" not in none
    assert "ranks need up to" in submit("--dry-run", "--mem=1", "trainer.devices=8")
    assert "sbatch gives the actor the server's --mem=1G" in submit("--dry-run", "--server-mem=1G")


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ((), True),
        (("trainer.precision=32",), False),
        (("trainer.precision=bf16",), False),
        (("--actor-gpus=1",), False),
    ],
)
def test_precision_auto_on_a_machine_without_a_gpu_is_a_warning(submit, words, warns):
    text = submit("--dry-run", *words)
    assert submit.code == 0
    assert ("trainer.precision is auto" in text) == warns


def test_a_reward_function_instead_of_a_model(submit):
    submit.right_server = ["reward_function.name=reinforce_rl.rewards.functions.gsm8k"]
    assert submit("--dry-run")
    assert submit.code == 0
    assert "but one process serves a reward function" in submit("--dry-run", server=("devices=2",))
    text = submit("reward=function", "reward_function.name=builtins.len")
    assert "slurm.servers.not_needed" in printed_keys(text)
    assert "reward is 'function'" in text


def test_a_relative_folder_becomes_absolute(submit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("'runs/a'", "runs/${exp_manager.name}"):
        text = submit("--dry-run", f"exp_manager.explicit_log_dir={given}")
        assert (
            f"--output={tmp_path}/runs/{'a' if '$' not in given else 'reinforce'}/slurm/%j.out"
            in text
        )
    assert "explicit_log_dir cannot be resolved" in submit(
        "exp_manager.explicit_log_dir=${nowhere}"
    )
    submit.right_actor = [word for word in submit.right_actor if "log_dir" not in word]
    assert f"REINFORCE_RUN_DIR={tmp_path}/results/reinforce " in submit("--dry-run")
    monkeypatch.setenv("REINFORCE_RUN_DIR", "/shared/b")
    assert "REINFORCE_RUN_DIR=/shared/b " in submit("--dry-run")


# Output of Slurm 22.05.
PARTITIONS = "batch*|up|infinite\nsmall|up|1:00:00\noff|down|infinite\ndgx|up|2-00:00:00\n"


def component(nodes: int, name: str = "actor", **options) -> Component:
    return Component(name, name, nodes, 1, options=ComponentOptions(**options))


def job(server: Component, actor: Component, seconds: int | None = 600) -> JobPlan:
    options = replace(parse_options([], {}), time="10", seconds=seconds)
    return JobPlan(
        server,
        actor,
        options,
        Settings(Path("/run"), Path("/repo")),
        300,
        {},
    )


def ask(server: Component, actor: Component, megabytes: int = 0) -> Answer:
    return ask_cluster(Path("/nowhere"), job(server, actor), megabytes, os.environ)


@pytest.mark.parametrize(
    ("partition", "seconds", "key", "values"),
    [
        (None, None, "", ()),
        ("dgx,small", 3600, "", ()),
        ("small", 3600, "", ()),
        ("dgx,small", 3660, "", ()),  # one feature of several is enough
        ("small", 3660, "slurm.partition.unusable", ("partition small", "3600 s", "3660")),
        ("small", None, "slurm.partition.unusable", ("no limit",)),
        ("off", 600, "slurm.partition.unusable", ("the actor", "partition off is not up")),
        ("off,small", 3660, "slurm.partition.unusable", ("off is not up", "small", "3600 s")),
        (
            "nowhere",
            600,
            "slurm.partition.unknown",
            ("nowhere", "--partition", "batch, dgx, off, small"),
        ),
    ],
)
def test_partitions_that_sbatch_would_accept_and_never_start(partition, seconds, key, values):
    faults = list(
        partition_faults(job(component(1), component(1, partition=partition), seconds), PARTITIONS)
    )
    assert bool(faults) == bool(key)
    if key:
        check_fault(faults, key, *values)


def test_a_cluster_without_a_default_partition():
    (fault,) = partition_faults(
        job(component(1), component(1, partition="dgx")), PARTITIONS.replace("*", "")
    )
    check_fault([fault], "slurm.partition.no_default", "--partition", "batch")
    assert not list(partition_faults(job(component(1), component(1), 60), "batch*|up|n/a\n"))


def test_an_invalid_line_of_sinfo_is_named():
    with pytest.raises(SlurmCallError, match=r"printed 'act0\|idle'"):
        list(partition_faults(job(component(1), component(1)), "act0|idle\n"))


def test_what_fits(slurm):
    answer = ask(component(1, "server"), component(2))
    assert (answer.faults, answer.warnings, answer.unchecked) == ([], [], [])
    assert answer.starts == (
        Start("2026-01-02T03:04:05", "n0"),
        Start("2026-01-02T03:04:05", "n0,n1"),
    )


def test_components_that_fit_singly_but_not_together(slurm):
    (fault,) = ask(component(2, "server"), component(3)).faults
    values = ("server would get n0,n1 and the actor n0,n1,n2", "2 + 3")
    check_fault([fault], "slurm.components.do_not_fit", *values)
    assert ask(component(1, "server"), component(3)).faults == []


def test_a_server_that_takes_nodes_which_the_actor_cannot_do_without(slurm):
    """Like a real Slurm, which leaves four idle nodes idle."""
    actor = component(2, constraint="gpu")
    (fault,) = ask(component(1, "server"), actor).faults
    values = ("the server would get n0", "--server-constraint")
    check_fault([fault], "slurm.components.take_nodes", *values)
    assert ask(component(1, "server", exclude="n0,n1"), actor).faults == []
    assert ask(component(1, "server"), component(1, constraint="gpu")).faults == []


def test_an_exclusion_by_a_file(slurm, tmp_path):
    (tmp_path / "hosts").write_text("n1\nn2\n")
    assert ask(component(1, "server"), component(1, exclude=str(tmp_path / "hosts"))).faults == []
    assert "--exclude=n1,n2,n0" in slurm.calls("sbatch")[-1]


def test_nodes_with_too_little_memory(slurm):
    for there, warned in (("4000", False), ("4000\n2000+", True)):
        slurm.answer("sinfo-memory", there)
        answer = ask(component(1, "server"), component(2), 3000)
        assert answer.faults == []
        assert (
            "up to 3000 MB" in "".join(answer.warnings)
            and "nodes with 2000 MB" in answer.warnings[0]
        ) is warned
    assert ask(component(1, "server"), component(2, mem="8G"), 3000).warnings == []


def test_an_sbatch_that_names_no_nodes(slurm):
    slurm.answer("test-actor", error="sbatch: something else")
    answer = ask(component(1, "server"), component(1))
    assert answer.faults == []
    assert "cannot check whether the components fit together" in answer.warnings[0]
