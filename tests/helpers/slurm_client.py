"""Slurm's commands for submitting a job, played: each prints what a test says and keeps what it was called with."""

from __future__ import annotations

import os
from pathlib import Path

COMMANDS = ("sbatch", "sinfo", "squeue", "scontrol")
# sbatch gives the ids 100, 101, ...; its answers have the names sbatch-ID, test, and test-JOBNAME for one component.
SCRIPT = r"""#!/bin/bash
home={home} key={name}
printf '%s\x1f' "$key" "$@" >>"$home/calls"
printf '\x1e' >>"$home/calls"
if [ "$key" = sbatch ]; then
    case " $* " in
    *" --test-only "*" --wrap=true "*) key=$(printf '%s\n' "$@" | sed -n 's/^--job-name=/test-/p') ;;
    *" --test-only "*) key=test ;;
    *)
        number=$(($(cat "$home/number" 2>/dev/null || echo 99) + 1))
        echo $number >"$home/number"
        key=sbatch-$number
        env -0 >"$home/environment-$number"
        [ -e "$home/$key.code" ] || echo $number
        ;;
    esac
fi
cat "$home/$key.out" 2>/dev/null
cat "$home/$key.err" >&2 2>/dev/null
exit "$(cat "$home/$key.code" 2>/dev/null || echo 0)"
"""


class SlurmClient:
    """The commands, in a folder for PATH.

    Args:
        home: an empty folder.
    """

    def __init__(self, home: Path):
        self._home = home
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        for name in COMMANDS:
            script = self.bin / name
            script.write_text(SCRIPT.replace("{home}", f"'{home}'").replace("{name}", name))
            script.chmod(0o755)

    @property
    def path(self) -> str:
        """For PATH."""
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def answer(self, name: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        """What a command says from now on."""
        (self._home / f"{name}.out").write_text(text)
        (self._home / f"{name}.err").write_text(error)
        (self._home / f"{name}.code").unlink(missing_ok=True)
        if code:
            (self._home / f"{name}.code").write_text(str(code))

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        path = self._home / "calls"
        calls = path.read_text().split("\x1e")[:-1] if path.exists() else []
        found = [call.split("\x1f")[:-1] for call in calls]
        return [words for own, *words in found if own == name]

    def submissions(self) -> list[list[str]]:
        """The arguments of each sbatch that submitted something."""
        return [words for words in self.calls("sbatch") if "--test-only" not in words]

    def environment(self, job: int) -> dict[str, str]:
        """That a job was submitted with."""
        text = (self._home / f"environment-{job}").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0") if entry)
