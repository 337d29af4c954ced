"""The files that a training step enters are those that docs/architecture.md lists, at most 16."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from helpers.tiny_run import tiny_config, tiny_trainer

import reinforce_rl
from reinforce_rl.megatron.mesh import Mesh

PACKAGE = Path(reinforce_rl.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST_FILES = 16
TRACED_STEP = 2  # the first one also builds objects for all later ones


def section_of_page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("**A step, file by file**")
    return text[start : text.index("**A configuration key**", start)]


def listed_files() -> list[str]:
    """Return the files of the table, in its order."""
    return re.findall(r"^\| `(\w+/\w+\.py)` \|", section_of_page(), flags=re.MULTILINE)


def is_behind_a_call(file: str, sentence: str) -> bool:
    """Return whether the sentence below the table names the file or its folder."""
    folder = file.partition("/")[0]
    return f"`{file}`" in sentence or f"`{folder}/`" in sentence


class StepTracer:
    """Records the package's files whose functions are called while it is on, in order."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: list[str] = []
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or code in self._seen:
            return
        self._seen.add(code)
        path = Path(code.co_filename)
        if PACKAGE in path.parents:
            file = path.relative_to(PACKAGE).as_posix()
            if file not in self.files:
                self.files.append(file)


def files_of_one_step(folder: Path, mesh: Mesh) -> list[str]:
    """Return the files that the second of two steps enters while its clock runs."""
    tracer = StepTracer()
    config = tiny_config(
        folder, f"trainer.reinforce.max_steps={TRACED_STEP}", "trainer.reinforce.save_interval=0"
    )
    with tiny_trainer(config, mesh) as trainer:
        clock = trainer._clock
        start = clock.start
        stop = clock.stop

        def start_tracing(step: int) -> None:
            tracer.is_on = step == TRACED_STEP
            start(step)

        def stop_tracing() -> None:
            tracer.is_on = False
            stop()

        clock.start = start_tracing
        clock.stop = stop_tracing
        profile = sys.getprofile()
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            trainer.fit()
        finally:
            sys.setprofile(profile)
            threading.setprofile(None)  # type: ignore[arg-type]
    return tracer.files


def test_a_step_enters_the_files_of_the_list(tmp_path: Path, mesh: Mesh) -> None:
    files = files_of_one_step(tmp_path, mesh)
    listed = listed_files()
    _, sentence = section_of_page().split("What lies behind a call")
    assert len(listed) == len(set(listed)) <= MOST_FILES
    entered = [file for file in files if file in listed]
    assert entered == listed
    others = set(files) - set(listed)
    assert {file for file in others if not is_behind_a_call(file, sentence)} == set()


def test_a_folder_behind_a_call_holds_no_part_of_the_algorithm() -> None:
    _, sentence = section_of_page().split("What lies behind a call")
    for folder in ("algorithm", "policy", "rollout", "trainer"):
        assert not is_behind_a_call(f"{folder}/any.py", sentence)
