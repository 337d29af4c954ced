"""Every real component together: the served reward model on PyTriton and the training program.

The models are tiny and random: a policy, and a reward model with a random head. The other runs are
compared with one run of the launcher without faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers.errors import printed_keys
from helpers.real_run import (
    EXAMPLES,
    OTHER_VOCAB_SIZE,
    STEPS,
    VOCAB_SIZE,
    Actor,
    RealServer,
    World,
    environment,
)
from helpers.tiny_run import compose, json_lines, tiny_trainer, without_times
from helpers.toy_server import is_alive, wait_for

import reinforce_rl.trainer.run
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.monitoring.records import RolloutRow, read_rows, rollout_files
from reinforce_rl.reward_model.scorer import load_reward_model
from reinforce_rl.rewards.base import RewardRequest
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.trainer.reinforce import ReinforceTrainer
from reinforce_rl.utils.process import die_with_parent

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
triton = pytest.importorskip("tritonclient.http")

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(sys.platform != "linux", reason="PyTriton runs on Linux only"),
]

WINDOW = 10  # steps at the beginning and at the end that are compared
SEQUENCES = [[5, 6, 7], [9], list(range(4, 40)), [2, 63, 4, 4, 4, 17, 30]]
TEXTS = ["the rate", "a", "one more sentence to read"]


def freeze_at_step(step: int, actors: list[Actor], seconds: float = 240.0) -> None:
    """Stop each actor by SIGSTOP after `step` steps."""
    deadline = time.monotonic() + seconds
    running = list(actors)
    while running:
        for actor in list(running):
            assert actor.process.poll() is None, (
                f"an actor ended before step {step}:\n{actor.output}"
            )
            if actor.step >= step:
                os.kill(actor.process.pid, signal.SIGSTOP)
                running.remove(actor)
        assert time.monotonic() < deadline, "\n".join(actor.output for actor in running)
        time.sleep(0.02)


@dataclass
class Launched:
    """Result and observations of a run of examples/launch_local.py."""

    run_dir: Path
    code: int = -1
    output: str = ""
    command_lines: dict[psutil.Process, list[str]] = field(default_factory=dict)
    shared_memory: set[Path] = field(default_factory=set)
    left_in_tmp: list[str] = field(default_factory=list)

    @property
    def processes(self) -> list[psutil.Process]:
        """Return all descendants of the launcher."""
        return list(self.command_lines)

    @property
    def port(self) -> int:
        match = re.search(r"ready at http://127\.0\.0\.1:(\d+)", self.output)
        assert match, self.output
        return int(match.group(1))


def launch_local(
    world: World, run_dir: Path, *actor_overrides: str, seconds: float = 200.0
) -> Launched:
    """Run server and actor by the launcher to the end."""
    launched = Launched(run_dir)
    temporary = Path(tempfile.mkdtemp(prefix="e2e-"))  # short: Unix sockets are created in it
    log = run_dir.with_name(f"{run_dir.name}.log")
    command = [sys.executable, str(EXAMPLES / "launch_local.py"), "--run-dir", str(run_dir)]
    command += ["--server-args", *world.server_overrides("mean")]
    command += ["--actor-args", *world.actor_overrides(run_dir, *actor_overrides)]
    deadline = time.monotonic() + seconds
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env={**environment(), "TMPDIR": str(temporary)},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, (
                f"the launcher ran past {seconds} s:\n{log.read_text()}"
            )
            look_at_descendants(process.pid, launched)
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.kill()  # its reaper stops the other processes
            process.wait()
        launched.left_in_tmp = sorted(path.name for path in temporary.iterdir())
        shutil.rmtree(temporary, ignore_errors=True)
    launched.code = process.returncode
    launched.output = log.read_text()
    return launched


def look_at_descendants(pid: int, launched: Launched) -> None:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            # Look again each time: a process that was just forked still has its parent's command
            # line.
            with contextlib.suppress(psutil.Error):
                launched.command_lines[process] = process.cmdline() or launched.command_lines.get(
                    process, []
                )
    for process in launched.processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            launched.shared_memory.update(map(Path, re.findall(r"(/dev/shm/\S+)", maps)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def servers(world, tmp_path_factory):
    """Reward servers by pooling; the server with `last` has another tokenizer than the policy's."""
    options = {
        "mean": world.server_overrides("mean"),
        "last": [
            *world.server_overrides("last"),
            f"reward_model.tokenizer_path={world.other_tokenizer}",
        ],
    }
    started = {}
    try:
        for pooling, overrides in options.items():
            started[pooling] = RealServer(
                tmp_path_factory.mktemp(f"server_{pooling}"), *overrides
            ).start()
        yield started
    finally:
        for server in started.values():
            server.close()


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """A run of the launcher without faults."""
    return launch_local(world, tmp_path_factory.mktemp("undisturbed") / "run")


def rewards_by_step(run_dir: Path) -> list[float]:
    return [
        line["train/rewards"]
        for line in json_lines(run_dir / "metrics.jsonl")
        if "train/rewards" in line
    ]


def assert_learned(run_dir: Path) -> None:
    """The mean reward of the last steps exceeds the first steps' by more than chance."""
    rewards = rewards_by_step(run_dir)
    first = rewards[:WINDOW]
    last = rewards[-WINDOW:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / WINDOW)
    assert gain > 4 * error, (
        f"the reward did not rise: {gain:+.3f}, with a standard error of {error:.3f}"
    )


def same_but_for_times(run_dir: Path, other: Path) -> bool:
    left, right = (
        list(map(without_times, json_lines(folder / "metrics.jsonl")))
        for folder in (run_dir, other)
    )
    return left == right and [line["step"] for line in left] == list(range(STEPS + 1))


def rows_by_step(run_dir: Path) -> dict[int, list[RolloutRow]]:
    return {step: read_rows(path) for step, path in rollout_files(run_dir).items()}


def requests_of(server: RealServer) -> int:
    """Return the number of requests that it has answered."""
    return server.log.read_text().count("event=request id=")


def curl(server: RealServer, inputs: list[dict]) -> tuple[list[float], list[int]]:
    url = f"http://127.0.0.1:{server.port}/v2/models/reward_model/infer"
    command = ["curl", "-sS", "--fail", "-m", "30", "-d", json.dumps({"inputs": inputs}), url]
    answer = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=40, check=True).stdout
    )
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    return outputs["rewards"], outputs["status"]


def sentence_inputs(texts: list[str]) -> list[dict]:
    return [{"name": "sentences", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}]


def padded(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens, np.array([[len(sequence)] for sequence in sequences], np.int64)


def by_tritonclient(server: RealServer, **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=30) as client:
        inputs = []
        for name, array in arrays.items():
            inputs.append(
                triton.InferInput(
                    name, list(array.shape), "BYTES" if array.dtype == object else "INT64"
                )
            )
            inputs[-1].set_data_from_numpy(array)
        answer = client.infer("reward_model", inputs)
        return answer.as_numpy("rewards"), answer.as_numpy("status")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_curl_and_tritonclient_agree_with_a_direct_forward(servers, world, mesh, pooling):
    server = servers[pooling]
    direct = load_reward_model(world.trunk, world.head(pooling), mesh)
    expected = direct.score(SEQUENCES)
    assert np.ptp(expected) > 0.1  # otherwise any constant would agree
    tokens, lengths = padded(SEQUENCES)
    as_json = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }
        for name, array in (("tokens", tokens), ("sequence_lengths", lengths))
    ]
    rewards, status = curl(server, as_json)
    assert status == [0] * len(SEQUENCES)
    assert rewards == pytest.approx(expected, abs=1e-5)
    rewards, status = by_tritonclient(server, tokens=tokens, sequence_lengths=lengths)
    assert rewards.dtype == np.float32
    assert rewards.shape == (len(SEQUENCES), 1)
    assert status.dtype == np.int32
    assert rewards[:, 0] == pytest.approx(expected, abs=1e-5)

    tokenizer = load_tokenizer(world.trunk if pooling == "mean" else world.other_tokenizer)
    expected = direct.score([tokenizer(text)["input_ids"] for text in TEXTS])
    assert curl(server, sentence_inputs(TEXTS))[0] == pytest.approx(expected, abs=1e-5)
    sentences = np.array([[text.encode()] for text in TEXTS], dtype=object)
    assert by_tritonclient(server, sentences=sentences)[0][:, 0] == pytest.approx(
        expected, abs=1e-5
    )


def test_texts_are_scored_by_the_servers_own_template(servers, world, mesh):
    messages = ({"role": "user", "content": "hi"},)
    texts = ("oh dear", " no ")
    ends = (True, False)
    tokens = torch.zeros((2, 1), dtype=torch.long)
    request = RewardRequest(
        tokens, torch.ones(2).long(), ("", "tell me"), texts, (messages, ()), ({}, {}), ends
    )
    client = RemoteGPTRMClient(port=servers["last"].port)
    try:
        assert (
            client.check_compatible(
                TokenizerInfo.from_tokenizer(load_tokenizer(world.policy)), VOCAB_SIZE
            )
            == "text"
        )
        scores = client.infer_rm(request).result()
    finally:
        client.close()
    tokenizer = load_tokenizer(world.other_tokenizer)
    # For a plain prompt, the answer's outer spaces belong to tokens and are dropped.
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            tokenize=False,
        )
        for question, answer in (("hi", texts[0]), ("tell me", texts[1].strip()))
    ]
    rendered[1] = rendered[1].removesuffix("<eos>")  # it was cut
    direct = load_reward_model(world.trunk, world.head("last"), mesh)
    assert scores.status.tolist() == [0, 0]
    expected = direct.score(
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    )
    assert scores.values.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_launcher_makes_a_whole_run_and_leaves_nothing(undisturbed):
    check_whole_run(undisturbed, last_step=STEPS)


@pytest.mark.slow
def test_the_launcher_with_two_ranks(world, tmp_path):
    steps = ["trainer.reinforce.max_steps=2", "trainer.reinforce.val_check_interval=2"]
    launched = launch_local(world, tmp_path / "run", "trainer.devices=2", *steps)
    check_whole_run(launched, last_step=2)
    commands = [" ".join(line) for line in launched.command_lines.values()]
    assert any(
        "reinforce_rl.utils.ranks" in line and "--nproc-per-node 2" in line for line in commands
    )


def check_whole_run(launched, last_step: int) -> None:
    assert launched.code == 0, launched.output
    assert "Traceback" not in launched.output
    run_dir = launched.run_dir
    steps = [line["step"] for line in json_lines(run_dir / "metrics.jsonl")]
    assert steps == list(range(last_step + 1))
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.trainer_state["step"] == last_step
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert {"config.json", "tokenizer_config.json", "model.safetensors"} <= {
        p.name for p in (run_dir / "hf").iterdir()
    }
    for rows in rows_by_step(run_dir).values():
        assert len({row.prompt_id for row in rows}) == 8
        assert len(rows) == 8 * 4
    assert "event=stopped signal=SIGTERM" in (run_dir / "logs" / "server.log").read_text()

    names = " ".join(" ".join(line) for line in launched.command_lines.values())
    assert "tritonserver" in names
    assert "reinforce_rl train" in names
    assert launched.shared_memory
    wait_for(lambda: not any(map(is_alive, launched.processes)), 10)
    assert [process for process in launched.processes if is_alive(process)] == []
    assert [path for path in launched.shared_memory if path.exists()] == []
    # torchrun makes a folder for its ranks' error files, and leaves it.
    assert [name for name in launched.left_in_tmp if not name.startswith("torchelastic_")] == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", launched.port))


def test_the_rewards_on_disk_are_those_of_the_server_for_these_texts(undisturbed, servers):
    """Responses whose text determines all tokens: one token a character, no end token."""
    rows = [
        row
        for row in rows_by_step(undisturbed.run_dir)[STEPS]
        if len(row.response) == row.response_length
    ]
    assert len(rows) > 10
    rewards, _ = curl(servers["mean"], sentence_inputs([row.prompt + row.response for row in rows]))
    assert [row.reward for row in rows] == pytest.approx(rewards, abs=1e-5)


def test_a_run_learns(undisturbed):
    assert_learned(undisturbed.run_dir)


class NegatedTrainer(ReinforceTrainer):
    """Ascends the loss that it should descend."""

    def generate_reinforce_data(self, rollout_batch):
        data, metrics = super().generate_reinforce_data(rollout_batch)
        return dataclasses.replace(data, advantages=-data.advantages), metrics


def test_the_same_run_with_negated_advantages_does_not_pass_for_learning(
    world, servers, undisturbed, mesh, tmp_path, monkeypatch
):
    monkeypatch.setattr(reinforce_rl.trainer.run, "ReinforceTrainer", NegatedTrainer)
    run_dir = tmp_path / "run"
    client = RemoteGPTRMClient("127.0.0.1", servers["mean"].port)
    try:
        with tiny_trainer(
            load_config(compose(*world.actor_overrides(run_dir))), mesh, client
        ) as trainer:
            trainer.fit()
    finally:
        client.close()
    first, real_first = (rows_by_step(folder)[1] for folder in (run_dir, undisturbed.run_dir))
    texts = [(row.prompt, row.response) for row in first]
    assert texts == [(row.prompt, row.response) for row in real_first]
    advantages = [row.advantage for row in first]
    assert advantages == pytest.approx([-row.advantage for row in real_first], abs=1e-4)
    assert len(rewards_by_step(run_dir)) == STEPS
    with pytest.raises(AssertionError, match="the reward did not rise"):
        assert_learned(run_dir)


@pytest.mark.slow
def test_a_server_with_another_tokenizer_is_refused_before_the_model_is_loaded(
    world, servers, tmp_path
):
    no_weights = tmp_path / "policy"
    shutil.copytree(world.policy, no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    policy = f"pretrained_checkpoint.restore_from_path={no_weights}"
    actor = Actor(
        world, tmp_path / "run", servers["last"].port, policy, "remote_rm.reward_model.input=tokens"
    )
    try:
        assert actor.finish(90) == 1  # seconds on a quiet machine, most of them for imports
    finally:
        actor.close()
    assert set(printed_keys(actor.output)) == {"reward_server.tokens.differ"}
    assert f"127.0.0.1:{servers['last'].port}" in actor.output
    assert f"vocabulary size {VOCAB_SIZE} here, {OTHER_VOCAB_SIZE} there" in actor.output
    assert "vocabulary hash" in actor.output
    assert "Traceback" not in actor.output


@pytest.mark.slow
def test_a_run_goes_on_with_the_second_server_while_the_first_is_killed_and_comes_back(
    world, servers, undisturbed, tmp_path
):
    first = servers["mean"]
    (tmp_path / "second").mkdir()
    second = RealServer(tmp_path / "second", *world.server_overrides("mean")).start()
    actor = None
    try:
        already = requests_of(first)  # shared with other tests
        replicas = f"remote_rm.reward_model.replicas=[127.0.0.1:{second.port}]"
        actor = Actor(
            world, tmp_path / "run", first.port, replicas, "remote_rm.deadline_seconds=60"
        )
        freeze_at_step(3, [actor])
        first.kill_group()
        os.kill(actor.process.pid, signal.SIGCONT)
        freeze_at_step(STEPS // 2, [actor])  # on the second server alone
        first.start()
        os.kill(actor.process.pid, signal.SIGCONT)
        assert actor.finish(100) == 0, actor.output
        asked = [requests_of(first) - already, requests_of(second)]
    finally:
        if actor is not None:
            actor.close()
        second.close()
    assert f"127.0.0.1:{first.port}" in actor.output  # the failure is logged
    assert min(asked) > 0, asked
    assert same_but_for_times(actor.run_dir, undisturbed.run_dir)
    assert rows_by_step(actor.run_dir) == rows_by_step(undisturbed.run_dir)


@pytest.mark.slow
def test_a_killed_server_delays_a_patient_run_and_ends_an_impatient_one(
    world, servers, undisturbed, tmp_path
):
    server = servers["mean"]
    address = f"127.0.0.1:{server.port}"
    rows = rows_by_step(undisturbed.run_dir)
    patient = Actor(world, tmp_path / "patient", server.port, "remote_rm.deadline_seconds=200")
    impatient = Actor(world, tmp_path / "impatient", server.port, "remote_rm.deadline_seconds=4")
    actors = [patient, impatient]
    try:
        freeze_at_step(3, actors)
        server.kill_group()
        for actor in actors:
            os.kill(actor.process.pid, signal.SIGCONT)

        assert impatient.finish(90) == 1
        assert set(printed_keys(impatient.output)) == {"reward_server.server.no_answer"}
        assert address in impatient.output
        assert "Traceback" not in impatient.output
        reached = impatient.step
        assert 3 <= reached < STEPS
        checkpoint = latest_checkpoint(impatient.run_dir / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.trainer_state["step"] == reached
        # No failed call has become a reward: the rewards on disk are a healthy server's scores,
        # and there are no others.
        assert rows_by_step(impatient.run_dir) == {
            step: rows[step] for step in range(1, reached + 1)
        }

        # Several times, each with the reason: the first line may have scrolled
        # away.
        waiting = f"reward server {address} does not answer (connection refused); retrying"
        assert wait_for(lambda: patient.output.count(waiting) >= 2, 60), patient.output
        assert patient.process.poll() is None
        assert patient.step < STEPS
        assert wait_for(lambda: not server.left_behind()), server.left_behind()
        server.start()
        resumed = Actor(world, impatient.run_dir, server.port)
        actors.append(resumed)
        assert patient.finish(100) == 0, patient.output
        assert resumed.finish(100) == 0, resumed.output
    finally:
        for actor in actors:
            actor.close()
    assert f"after step {reached} of {STEPS}" in resumed.output
    for actor in (patient, resumed):
        assert same_but_for_times(actor.run_dir, undisturbed.run_dir)
        assert rows_by_step(actor.run_dir) == rows
