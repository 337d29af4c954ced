"""Bubblewrap around the processes of reward functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from reinforce_rl.errors import ConfigError

KEY = "reward_function.sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
TMPFS_BYTES = 256 << 20
PROBE_SECONDS = 30.0


def bubblewrap(places: Sequence[str]) -> list[str]:
    """The beginning of a command that has no network, sees no other processes and cannot change a file.

    It reads Python's own folders, the current one and `places`. /tmp and /dev/shm are empty, writable and its own.

    Raises:
        ConfigError: bubblewrap is not installed or cannot work here.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError([f"{KEY} is true, but there is no 'bwrap'; install bubblewrap, 0.8 or later"])
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = {*SYSTEM, sys.prefix, sys.base_prefix, *places, *filter(None, libraries), os.getcwd()}
    real = {os.path.realpath(folder) for folder in folders}
    size = ["--size", str(TMPFS_BYTES), "--tmpfs"]
    # No signal from inside ends process 1, so no sample can end the host.
    command = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--as-pid-1"]
    command += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", *size, "/tmp"]
    # A folder comes after those in it, which it covers: so a symbolic link in it stays one.
    for folder in sorted(folders | real, key=len, reverse=True):
        command += ["--ro-bind-try", folder, folder]
    command += ["--remount-ro", "/", "--setenv", "TMPDIR", "/tmp", "--setenv", "HOME", "/tmp", "--chdir", os.getcwd()]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if probe.returncode != 0:
        raise ConfigError([f"{KEY} is true, but bubblewrap cannot work here: {probe.stderr.strip()}"])
    return command
