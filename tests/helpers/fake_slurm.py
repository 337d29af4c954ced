"""Slurm's commands that a job's script calls, as a script on PATH, and programs for its tasks.

They imitate the observed behaviour of a real Slurm, so that the script can be tested in seconds;
tests/launch/slurm also has tests on a real Slurm. All files are below the folder FAKE_SLURM.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("srun", "squeue", "scancel", "scontrol")

SERVER = """
import os, signal, sys, threading, time
from pathlib import Path
values = dict(arg.split("=", 1) for arg in sys.argv[1:])
ready = Path(values["inference.ready_file"])
number = ready.stem[-1]
if os.environ.get("FAKE_SERVER") in ("fails", "fails" + number):
    sys.exit(3)
if os.environ.get("FAKE_SERVER") in ("dies", "dies" + number):
    threading.Timer(3.0, lambda: os.kill(os.getpid(), 9)).start()
def drain(number, frame):
    time.sleep(5 if os.environ.get("FAKE_SERVER") == "drains slowly" else 0)
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
# one beside another that fails still loads
if not os.environ.get("FAKE_SERVER", "").startswith(("loads", "fails")):
    ready.write_text('{"host": "127.0.0.1", "port": 9}')
time.sleep(300)
"""

ACTOR = """
import json, os, signal, sys, time
from pathlib import Path
values = dict(arg.split("=", 1) for arg in sys.argv[1:])
run_dir = Path(values["exp_manager.explicit_log_dir"])
def save(step, state):
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints" / "latest").write_text(f"step_{step:08d}")
    (run_dir / "status.json").write_text(json.dumps({"state": state, "step": step}))
def stop(number, frame):
    save(7, "stopped")
    print("saved", flush=True)
    os._exit(75)
behaviour = os.environ.get("FAKE_ACTOR", "finishes")
def save_slowly(number, frame):
    time.sleep(float(os.environ["FAKE_SAVE_SECONDS"]))
    stop(number, frame)
def save_and_hang(number, frame):
    save(7, "stopped")
    time.sleep(300)
handler = {"saves slowly": save_slowly, "saves and hangs": save_and_hang}.get(behaviour, stop)
signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGUSR1, handler)
if os.environ["SLURM_PROCID"] == "0":
    meeting = {"address": "127.0.0.1", "port": 9}
    Path(os.environ["REINFORCE_RENDEZVOUS_FILE"]).write_text(json.dumps(meeting))
process = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
(run_dir / f"began.{os.environ['SLURM_PROCID']}").write_text(json.dumps(process))
if behaviour in ("finishes", "finishes later"):
    time.sleep(6 if behaviour == "finishes later" else 0)
    save(9, "finished")
elif behaviour == "fails" and os.environ["SLURM_PROCID"] == "1":
    print("an error of rank 1", flush=True)
    sys.exit(5)
elif behaviour.startswith("stops alone") and os.environ["SLURM_PROCID"] == "1":
    sys.exit(75)
elif behaviour == "stops alone":
    # In the rendezvous: nothing is saved.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    time.sleep(60)
elif behaviour == "stops alone, others start":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)
elif behaviour == "stops alone, others hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(200)
elif behaviour == "stops in time":
    save(7, "stopped")
    sys.exit(75)
elif behaviour == "diverges":
    save(7, "failed")
    sys.exit(77)
elif behaviour == "alerts":
    save(7, "stopped")
    sys.exit(78)
elif behaviour == "killed" and os.environ["SLURM_PROCID"] == "1":
    os.kill(os.getpid(), 9)
else:
    time.sleep(60)
"""

GENERATOR = """
import os, signal, sys, time
from pathlib import Path
values = dict(arg.split("=", 1) for arg in sys.argv[1:])
run_dir = Path(values["exp_manager.explicit_log_dir"])
print(os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1:], flush=True)
def stop(number, frame):
    # Both Slurm and the wrapper signal each process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / f"drained.{time.time_ns()}").touch()
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
starts = len(list(run_dir.glob("generates.*")))
(run_dir / f"generates.{time.time_ns()}").touch()  # nodes may have the same process ids
behaviour = os.environ.get("FAKE_GENERATOR", "")
if behaviour == "always dies" or (behaviour == "dies once" and not starts):
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


def write_commands(folder: Path) -> Path:
    """Write the scripts; return the folder for PATH."""
    folder.mkdir(parents=True)
    for name in COMMANDS:
        script = folder / name
        script.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{__file__}' {name} \"$@\"\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def write_python(folder: Path) -> Path:
    """Write a `python` that replaces `run_module.py reinforce_rl COMMAND` by a program here."""
    folder.mkdir(parents=True)
    for name, program in (("serve", SERVER), ("train", ACTOR), ("generate", GENERATOR)):
        (folder / f"{name}.py").write_text(program)
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        'if [ "${1##*/} $2" = "run_module.py reinforce_rl" ]; then\n'
        f'    set -- "{folder}/$3.py" "${{@:4}}"\n'
        "fi\n"
        f"exec '{sys.executable}' \"$@\"\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def srun(home: Path, arguments: list[str]) -> int:
    """Start each task in a separate session; stop the others if one fails."""
    split = next(place for place, word in enumerate(arguments) if not word.startswith("--"))
    options = dict(word[2:].partition("=")[::2] for word in arguments[:split])
    name = options["job-name"]
    each = int(options["ntasks-per-node"])
    command = arguments[split:]
    tasks = []
    if name == "actor" and os.environ.get("FAKE_ACTOR") == "never begins":
        command = ["sh", "-c", "trap '' TERM; sleep 600"]
    image = dict(word.split("=") for word in os.environ.get("FAKE_IMAGE", "").split())
    with open(options["output"], "w") as log:
        for number in range(int(options["ntasks"])):
            place = {"PROCID": number, "LOCALID": number % each, "NODEID": number // each}
            place["STEP_NUM_NODES"] = int(options["nodes"])
            variables = {f"SLURM_{key}": str(value) for key, value in place.items()}
            environment = {**os.environ, **variables, **image}
            if "FAKE_IMAGE_PYTHONPATH" in os.environ:
                environment["PYTHONPATH"] = os.environ["FAKE_IMAGE_PYTHONPATH"]
            tasks.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
        pids = home / f"step-{name}"
        pids.write_text(" ".join(str(task.pid) for task in tasks))
        deadline: float | None = None
        while any(task.poll() is None for task in tasks):
            if deadline is None and any(task.poll() for task in tasks):
                deadline = time.monotonic() + 1.0
                send(pids, signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                send(pids, signal.SIGKILL)
            time.sleep(0.05)
        pids.unlink()
    for number, task in enumerate(tasks):
        if task.returncode:
            how = f"Exited with exit code {task.returncode}"
            if task.returncode in (-9, 137):
                how = "Killed"
            print(f"srun: error: node{number // each}: task {number}: {how}", file=sys.stderr)
    return 143 if any(task.returncode for task in tasks) else 0


def send(pids: Path, number: int) -> None:
    """Send a signal to all processes of the step."""
    for pid in pids.read_text().split() if pids.exists() else ():
        try:
            os.killpg(int(pid), number)
        except ProcessLookupError:
            continue


def squeue(home: Path, arguments: list[str]) -> int:
    """Print steps, the job's times, or its state."""
    job = arguments[arguments.index("-j") + 1]
    if "--steps" in arguments:
        for pids in home.glob("step-*"):
            first = job.partition(",")[0]
            step = pids.name.removeprefix("step-")
            print(f"{first}.{step}|{step}")
    elif arguments[-1] == "%t":
        print("R" if (home / f"running-{job}").exists() else "")
    else:
        left = os.environ.get("FAKE_SECONDS_LEFT", "600")
        end = str(int(time.time()) + int(left)) if left != "unlimited" else "NONE"
        for number in job.split(","):
            print(f"{number}|1000|{end}")
    return 0


def main(name: str, arguments: list[str]) -> int:
    home = Path(os.environ["FAKE_SLURM"])
    if name == "srun":
        return srun(home, arguments)
    if name == "squeue":
        return squeue(home, arguments)
    if name == "scancel":
        step = arguments[-1].partition(".")[2]
        number = arguments[1].partition("=")[2]
        send(home / f"step-{step}", int(number))
    elif arguments[:2] == ["show", "hostnames"]:
        if arguments[2] == "nowhere":  # the output for a node list that it cannot parse
            return 1
        print(*arguments[2].split(","), sep="\n")
    elif arguments[0] == "requeue":
        (home / "requeued").write_text(arguments[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
