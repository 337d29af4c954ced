"""Code on the batch host and around the tasks runs on Python 3.9 without packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import reinforce_rl.launch.slurm.attempt, reinforce_rl.launch.slurm.task
for name, module in list(sys.modules.items()):
    if name.startswith("reinforce_rl"):
        print(module.__file__)
"""


def test_nothing_but_the_standard_library_is_imported_and_python_39_reads_it() -> None:
    # -S excludes site-packages
    line = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        PROGRAM,
        str(REPOSITORY),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    files = [Path(name) for name in done.stdout.split()]
    assert {"attempt.py", "task.py", "status.py", "errors.py"} <= {file.name for file in files}
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"), file.name, feature_version=(3, 9))
        strict = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "strict"
        ]
        assert not strict, f"{file}: zip(strict=...) came with Python 3.10"
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "orig_argv" not in attributes, f"{file}: sys.orig_argv came with Python 3.10"
