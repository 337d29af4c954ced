"""Twenty mistakes of a first hour, in real processes: one message with the fix, and no noise."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.errors import printed_keys
from helpers.tiny_run import three_letters, write_prompts
from helpers.tiny_tokenizer import write_model_without_weights
from helpers.troubleshooting import answers

ROOT = Path(__file__).parents[2]
ACTOR = "train_reinforce_actor.py"
# CPU seconds until the message; on an idle machine this is wall-clock time
OF_CONFIG = 3.0
OF_DATA = 20.0
BUSY = 10.0  # a machine that runs other tests may take this many times longer
slow = pytest.mark.slow


@dataclass(frozen=True)
class Mistake:
    """A mistake and its expected message.

    Attributes:
        name: id of the test.
        overrides: appended to a valid run's overrides; `{}` is the folder that `made` gets.
        keys: of the errors that are printed.
        values: values in the message.
        seconds: until the message.
        made: writes the files that the overrides name.
        script, right: differ if the mistake does not concern the actor.
        as_nobody: drop root's privileges, which allow all reads and writes.
    """

    name: str
    overrides: list[str]
    keys: list[str]
    values: list[str]
    seconds: float = OF_CONFIG
    made: Callable[[Path], object] = field(default=lambda folder: None)
    script: str = ACTOR
    right: bool = True
    as_nobody: bool = False
    marks: tuple = ()


def lines(name: str, *rows: object) -> Callable[[Path], object]:
    """Return a function that writes a JSONL file; a string is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return lambda folder: (folder / name).write_text("".join(text + "\n" for text in texts))


def raw(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def without_template(folder: Path) -> None:
    write_model_without_weights(folder / "m", chat_template=None)
    lines(
        "p.jsonl",
        *({"messages": [{"role": "user", "content": text}]} for text in three_letters(20)),
    )(folder)


def unreadable(folder: Path) -> None:
    write_prompts(folder / "p.jsonl", three_letters(8)).chmod(0)


def read_only(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs").chmod(0o555)


TRAIN = "model.data.data_prefix.train"
PAIRS = "train_reward_model.py"
SERVER = "serve_reward_model.py"
PROMPTS = [{"prompt": text} for text in three_letters(80)]

MISTAKES = [
    # Configuration.
    Mistake(
        "wrong path",
        [f"{TRAIN}={{}}/none.jsonl"],
        ["data.file.missing"],
        [TRAIN, "{}/none.jsonl"],
    ),
    Mistake(
        "misspelt key",
        ["trainer.devces=2"],
        ["config.key.unknown"],
        ["trainer.devces", "trainer.devices"],
    ),
    Mistake(
        "two misspelt keys",
        ["trainer.devces=2", "model.optim.learning_rate=1e-5"],
        ["config.key.unknown", "config.key.unknown"],
        ["trainer.devces", "trainer.devices", "model.optim.learning_rate"],
    ),
    Mistake(
        "keys of NeMo-Aligner",
        [
            "trainer.reinforce.batch_iterator.use_flask=true",
            "++trainer.reinforce.trt_llm.enable=true",
            "rm_model_file=a",
        ],
        ["config.key.renamed", "config.key.renamed", "config.key.renamed"],
        [
            "trainer.reinforce.batch_iterator.use_flask",
            "trainer.reinforce.generation_work_queue",
            "rm_model_file",
            "trainer.reinforce.trt_llm.enable",
            "generation=tensorrt_llm",
        ],
        marks=(slow,),
    ),
    Mistake(
        "text for a number",
        ["trainer.devices=two"],
        ["config.value.wrong_type"],
        ["trainer.devices is 'two'"],
    ),
    Mistake(
        "batch that does not divide",
        ["model.global_batch_size=7"],
        ["config.global_batch_size.not_a_divisor_of_step"],
        ["model.global_batch_size is 7", "multiple of 4"],
    ),
    Mistake(
        "TP that does not divide",
        ["trainer.devices=3", "model.tensor_model_parallel_size=3"],
        ["config.tensor_model_parallel_size.not_a_divisor_of_feed_forward"],
        ["model.tensor_model_parallel_size is 3", "32 (intermediate_size)", "model/config.json"],
    ),
    Mistake(
        "negative learning rate",
        ["model.optim.lr=-1"],
        ["config.value.out_of_range"],
        ["model.optim.lr is -1.0", "expected above 0"],
    ),
    Mistake(
        "G of 1 with RLOO",
        ["trainer.reinforce.num_rollouts_per_prompt=1"],
        ["config.num_rollouts_per_prompt.too_small_for_estimator"],
        [
            "trainer.reinforce.num_rollouts_per_prompt is 1",
            "advantage_estimator=rloo",
            "at least 2",
        ],
    ),
    Mistake(
        "empty JSONL",
        [f"{TRAIN}={{}}/p.jsonl"],
        ["data.file.empty"],
        ["{}/p.jsonl", "JSONL"],
        made=lines("p.jsonl"),
    ),
    Mistake(
        "CSV without the column",
        [f"{TRAIN}={{}}/p.csv"],
        ["data.column.missing"],
        [
            "{}/p.csv:2",
            "question, answer",
            "expected exactly one of prompt",
            "model.data.fields.prompt=question",
        ],
        OF_DATA,
        made=raw("p.csv", b'question,answer\n"What is 1, or 2?",2\n'),
        marks=(slow,),
    ),
    Mistake(
        "Parquet",
        [f"{TRAIN}={{}}/p.parquet"],
        ["data.parquet.other_form"],
        ["{}/p.parquet", "JSONL"],
        made=raw("p.parquet", b"404: Not Found"),
    ),
    Mistake(
        "gz",
        [f"{TRAIN}={{}}/p.jsonl.gz"],
        ["data.file.unreadable"],
        ["{}/p.jsonl.gz", "Compressed file ended"],
        made=raw("p.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n')[:-12]),
    ),
    Mistake(
        "broken JSON array",
        [f"{TRAIN}={{}}/p.json"],
        ["data.file.not_json"],
        ["{}/p.json", "line 3 column"],
        OF_DATA,
        made=raw("p.json", json.dumps(PROMPTS, indent=2).replace('"', "'").encode()),
        marks=(slow,),
    ),
    Mistake(
        "unreadable file",
        [f"{TRAIN}={{}}/p.jsonl"],
        ["file.not_readable"],
        ["{}/p.jsonl", "Permission denied"],
        made=unreadable,
        as_nobody=True,
    ),
    Mistake(
        "misspelt function, beside another fault",
        [
            "reward=function",
            "reward_function.name=reinforce_rl.rewards.functions.gms8k",
            "model.optim.lr=-1",
        ],
        ["reward_function.name.unknown", "config.value.out_of_range"],
        ["'gms8k'", "reinforce_rl.rewards.functions.gsm8k", "model.optim.lr is -1.0"],
    ),
    Mistake(
        "function of other arguments",
        ["reward=function", "reward_function.name=os.getcwd"],
        ["reward_function.arguments.wrong"],
        ["os.getcwd()", "NAME(prompt, response, record, **kwargs)", "TRL"],
    ),
    Mistake(
        "list without brackets",
        ["model.reinforce.sampling_params.end_strings=a, b"],
        ["config.override.bare_comma"],
        ["a, b", "model.reinforce.sampling_params.end_strings='[a, b]'"],
    ),
    Mistake(
        "log folder that cannot be made",
        ["exp_manager.explicit_log_dir=/proc/run"],
        ["folder.not_writable"],
        ["exp_manager.explicit_log_dir is /proc/run", "in /proc"],
    ),
    Mistake(
        "log folder of another user",
        ["exp_manager.explicit_log_dir={}/logs/run"],
        ["folder.not_writable"],
        ["exp_manager.explicit_log_dir is {}/logs/run", "Permission denied"],
        made=read_only,
        as_nobody=True,
    ),
    # Data, which need the tokenizer.
    Mistake(
        "broken JSON at line 57",
        [f"{TRAIN}={{}}/p.jsonl"],
        ["data.line.not_json"],
        ["{}/p.jsonl:57", "Invalid control character", "column 14"],
        OF_DATA,
        lines("p.jsonl", *PROMPTS[:56], '{"prompt": "a', *PROMPTS[57:]),
    ),
    Mistake(
        "missing prompt key",
        [f"{TRAIN}={{}}/p.jsonl"],
        ["data.column.missing"],
        ["{}/p.jsonl:2", "question, answer", "prompt, text and messages"],
        OF_DATA,
        lines("p.jsonl", PROMPTS[0], {"question": "a", "answer": "b"}),
        marks=(slow,),
    ),
    Mistake(
        "prompt beyond the limit",
        [f"{TRAIN}={{}}/p.jsonl"],
        ["data.prompt.too_long"],
        ["{}/p.jsonl:1", "49", "48", "too_long=skip"],
        OF_DATA,
        lines("p.jsonl", {"prompt": "e" * 49}, *PROMPTS),
        marks=(slow,),
    ),
    Mistake(
        "no chat template",
        [f"{TRAIN}={{}}/p.jsonl", "pretrained_checkpoint.restore_from_path={}/m"],
        ["chat_template.template.missing"],
        ["{}/m", "messages", "model.data.apply_chat_template=true"],
        OF_DATA,
        without_template,
        marks=(slow,),
    ),
    Mistake(
        "server down",
        ["remote_rm.reward_model.port={free}", "remote_rm.ready_timeout_seconds=1"],
        ["reward_server.server.no_answer"],
        ["localhost:{free}", "connection refused"],
        OF_DATA,
    ),
    Mistake(
        "wrong port",
        ["remote_rm.reward_model.port={taken}", "remote_rm.ready_timeout_seconds=1"],
        ["reward_server.server.no_answer"],
        ["localhost:{taken}"],
        OF_DATA,
        marks=(slow,),
    ),
    Mistake(
        "port in use",
        [
            "reward_function.name=reinforce_rl.rewards.functions.gsm8k",
            "inference.port={taken}",
        ],
        ["server.port.in_use"],
        ["{taken}", "127.0.0.1", "inference.port=N"],
        script=SERVER,
        right=False,
    ),
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that any user can read, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.chmod(0o755)
    write_model_without_weights(folder / "model")
    write_prompts(folder / "train.jsonl", three_letters(8))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """A free port, and a port where a process with an unknown protocol listens."""
    with socket.socket() as free, socket.create_server(("127.0.0.1", 0)) as taken:
        free.bind(("127.0.0.1", 0))  # bound without listening, so nobody else gets it
        yield {"free": free.getsockname()[1], "taken": taken.getsockname()[1]}


def right(folder: Path, out: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
        f"model.data.data_prefix.train={folder / 'train.jsonl'}",
        f"exp_manager.explicit_log_dir={out / 'run'}",
        "model.encoder_seq_length=64",
        "model.reinforce.length_params.max_length=16",
    ]


def said_by(command: list[str], seconds: float, *, as_nobody: bool = False) -> str:
    """Run a program and return its output.

    It must exit with code 1, in time and without a traceback or a library's warning.
    """
    if as_nobody and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root without setpriv is never refused a file")
        # without capabilities file modes also apply to root
        command = ["setpriv", "--bounding-set=-all", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUSY * seconds, cwd="/", env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = done.stdout + done.stderr
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"exit code {done.returncode} after {took:.1f} s of CPU:\n{said}")
    assert done.returncode == 1
    assert re.search(r"Traceback|Warning|Error executing job", said) is None
    assert len(re.findall("^error: ", said, re.M)) == 1
    assert took < seconds
    return said


@pytest.mark.more
def test_a_full_disk_is_reported_before_the_start(folder):
    """Mount a file system that is too small even for this model."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    mount = f"mount -t tmpfs -o size=16k none {disk} && exec"
    command = [sys.executable, str(ROOT / "examples" / ACTOR), *right(folder, disk)]
    said = said_by(["unshare", "--mount", "sh", "-c", f"{mount} {shlex.join(command)}"], OF_DATA)
    assert printed_keys(said) == ["preflight.disk.too_little_space"]
    assert f"exp_manager.explicit_log_dir is {disk / 'run'}" in said
    assert re.search(r"\d[\d.]* kB", said)


@pytest.mark.more
@pytest.mark.parametrize("mistake", [pytest.param(m, id=m.name, marks=m.marks) for m in MISTAKES])
def test_a_mistake_gives_one_message(mistake, folder, ports, tmp_path_factory):
    out = folder / re.sub(r"\W", "_", mistake.name)
    out.mkdir()
    mistake.made(out)

    def filled(text: str) -> str:
        text = text.replace("{free}", str(ports["free"]))
        text = text.replace("{taken}", str(ports["taken"]))
        return text.replace("{}", str(out))

    overrides = [filled(override) for override in mistake.overrides]
    values = [filled(value) for value in mistake.values]
    command = [sys.executable, str(ROOT / "examples" / mistake.script)]
    said = said_by(
        [*command, *(right(folder, out) if mistake.right else []), *overrides],
        mistake.seconds,
        as_nobody=mistake.as_nobody,
    )
    assert sorted(printed_keys(said)) == sorted(mistake.keys)
    assert [value for value in values if value not in said] == []
    assert answers(said)  # the troubleshooting page has this message
    counted = re.search(r"(\d+) faults? in the configuration", said)
    assert (int(counted.group(1)) if counted else 1) == len(mistake.keys)
    if mistake.seconds == OF_CONFIG:
        assert not (out / "run").exists()
