"""Runs a user's code in a host process: few environment variables, optionally a sandbox."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.control_characters import show_control_characters
from reinforce_rl.utils.process import Message, ModuleChild, import_path, receive

START_SECONDS = 120.0  # a module may import much, on a busy machine
STOP_SECONDS = 10.0
# One thread per process, or each would use every core.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
# Environment passed to the code; the rest may hold tokens and keys.
VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE"),
    "CUDA_VISIBLE_DEVICES",
)
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")  # in small letters too
VARIABLE_PREFIXES = ("LC_", "PYTHON")
ETC_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *ETC_FILES)
PRIVATE_FOLDERS = ("/dev", "/proc", "/tmp")  # a sandbox has its own
TMPFS_BYTES = 256 << 20
PROBE_SECONDS = 30.0


class UserCode(ModuleChild):
    """A host process that runs a user's code, optionally in a sandbox.

    It gets the environment variables in `VARIABLES` and the `allowed` ones, and no others. Its
    output is this process's.

    Args:
        module: the host's program.
        allowed: names of further variables.
        sandbox: the key that asks for a sandbox; None for none.
    """

    def __init__(self, module: str, *, allowed: Sequence[str], sandbox: str | None):
        folders = import_path().split(os.pathsep)
        names = {*VARIABLES, *allowed}
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in names or name.startswith(VARIABLE_PREFIXES) or _is_open_proxy(name, value)
        }
        super().__init__(
            module,
            prefix=bubblewrap(folders, sandbox) if sandbox else (),
            env={**ONE_THREAD, **variables, "PYTHONPATH": os.pathsep.join(folders)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def load(self, settings: Mapping[str, Any]) -> Message | None:
        """Let the process import the code; return its answer, or None if it ended."""
        output = threading.Thread(target=self._show_output, daemon=True)
        output.start()
        with contextlib.suppress(OSError):
            self.connection.send(settings)
        if not self.connection.poll(START_SECONDS):
            self.kill()
        answer = receive(self.connection)
        if answer is None:
            self.wait()
            output.join(STOP_SECONDS)
        return answer

    def _show_output(self) -> None:
        assert self.process.stdout is not None
        # A terminal would obey what a program printed that the code started.
        decoder = codecs.getincrementaldecoder("utf-8")("replace") if os.isatty(2) else None
        # Through a pipe, since RLIMIT_FSIZE would otherwise count the size of the log file.
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            if decoder is not None:
                chunk = show_control_characters(decoder.decode(chunk)).encode()
            with contextlib.suppress(OSError):  # a full log must not block the code
                os.write(2, chunk)


def _is_open_proxy(name: str, value: str) -> bool:
    """Return True for a proxy without a password."""
    return name.upper() in PROXY_VARIABLES and "@" not in value


def _covers_private(folder: str) -> bool:
    """Return True if mounting a folder would cover one of the sandbox's own."""
    real = Path(os.path.realpath(folder))
    return any(Path(private).is_relative_to(real) for private in PRIVATE_FOLDERS)


def bubblewrap(folders: Sequence[str], setting: str) -> list[str]:
    """Return the prefix of a command without network, other processes or write access to files.

    It can read Python's own folders, the current one and `folders`; /tmp and /dev/shm are private
    tmpfs. `setting` is the key that asks for it, for messages.

    Raises ConfigError if bubblewrap is not installed or cannot work here, or if one of `folders` is
    /, /dev, /proc or /tmp. A current folder that is one of these is not shown.
    """
    program = shutil.which("bwrap")
    if program is None:
        sentence = f"{setting} is true, but there is no 'bwrap'; install bubblewrap, 0.8 or later"
        raise ConfigError([Fault(sentence, key="reward_function.sandbox.no_bubblewrap")])
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    readable = {*SYSTEM_FOLDERS, sys.prefix, sys.base_prefix, *folders, *filter(None, libraries)}
    if too_wide := sorted(filter(_covers_private, readable)):
        sentence = (
            f"{setting} is true, but the code would be shown the whole of {too_wide[0]}, which "
            "is on sys.path or LD_LIBRARY_PATH; start elsewhere, and keep the code in a folder "
            "of its own"
        )
        raise ConfigError([Fault(sentence, key="reward_function.sandbox.folder_too_wide")])
    if not _covers_private(os.getcwd()):
        readable.add(os.getcwd())
    real = {os.path.realpath(folder) for folder in readable}
    size = ["--size", str(TMPFS_BYTES), "--tmpfs"]
    # No signal from inside ends process 1, so no sample can end the host.
    command = [
        program,
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--cap-drop",
        "ALL",
        "--as-pid-1",
    ]
    command += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", *size, "/tmp"]
    # A folder comes after those in it, which it covers: so a symbolic link in it stays one.
    for folder in sorted(readable | real, key=len, reverse=True):
        command += ["--ro-bind-try", folder, folder]
    command += [
        "--remount-ro",
        "/",
        "--setenv",
        "TMPDIR",
        "/tmp",
        "--setenv",
        "HOME",
        "/tmp",
        "--chdir",
        os.getcwd(),
    ]
    probe = subprocess.run(
        [*command, "true"],
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if probe.returncode != 0:
        sentence = f"{setting} is true, but bubblewrap cannot work here: {probe.stderr.strip()}"
        raise ConfigError([Fault(sentence, key="reward_function.sandbox.not_working")])
    return command
