"""Fake Slurm submission commands with scripted output and recorded calls."""

from __future__ import annotations

import os
from pathlib import Path

COMMANDS = ("sbatch", "sinfo", "squeue")
# sbatch gives the ids 100, 101, ... Its scripted answers are named sbatch-ID, test, and
# test-JOBNAME for one component. Without an answer a component gets the first free nodes of n0 to
# n3; n0 and n1 have the feature gpu.
SCRIPT = r"""#!/bin/bash
home={home} key={name}
printf '%s\x1f' "$key" "$@" >>"$home/calls"
printf '\x1e' >>"$home/calls"
if [ "$key" = sbatch ]; then
    case " $* " in
    *" --test-only "*" --wrap=true "*)
        nodes=(n0 n1 n2 n3) chosen=()
        for word in "$@"; do
            case $word in
            --job-name=*) key=test-${word#*=} ;;
            --constraint=gpu) nodes=(n0 n1) ;;
            --nodes=*) count=${word#*=} ;;
            --exclude=*) exclude=,${word#*=}, ;;
            esac
        done
        for node in "${nodes[@]}"; do
            [[ ${exclude:-} = *,$node,* || ${#chosen[@]} = "$count" ]] || chosen+=("$node")
        done
        if [ -e "$home/$key.out" ]; then
            :
        elif [ ${#chosen[@]} = "$count" ]; then
            nodes=$(IFS=, && echo "${chosen[*]}")
            start="Job 1 to start at 2026-01-02T03:04:05 using 1 processors"
            echo "sbatch: $start on nodes $nodes in partition p" >&2
        else
            echo "allocation failure: Requested node configuration is not available" >&2
            exit 1
        fi
        ;;
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
case "$key $*" in "sinfo "*%m) key=sinfo-memory ;; esac
cat "$home/$key.out" 2>/dev/null
cat "$home/$key.err" >&2 2>/dev/null
exit "$(cat "$home/$key.code" 2>/dev/null || echo 0)"
"""


class SlurmClient:
    """The fake commands, in a folder for PATH below the empty folder `home`."""

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
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def answer(self, name: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        """Set a command's output from now on."""
        (self._home / f"{name}.out").write_text(text)
        (self._home / f"{name}.err").write_text(error)
        (self._home / f"{name}.code").unlink(missing_ok=True)
        if code:
            (self._home / f"{name}.code").write_text(str(code))

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a command."""
        path = self._home / "calls"
        calls = path.read_text().split("\x1e")[:-1] if path.exists() else []
        recorded = [call.split("\x1f")[:-1] for call in calls]
        return [words for command, *words in recorded if command == name]

    def submissions(self) -> list[list[str]]:
        """Return the arguments of each successful sbatch."""
        return [words for words in self.calls("sbatch") if "--test-only" not in words]

    def environment(self, job: int) -> dict[str, str]:
        """Return the environment with which a job was submitted."""
        text = (self._home / f"environment-{job}").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0") if entry)
