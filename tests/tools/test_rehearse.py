"""`tools/rehearse.py`: the size of its archive, counts of failures, other versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import rehearse as tool  # noqa: E402
from make_environment import python_of  # noqa: E402

MEBIBYTE = 2**20
PINS = {"torch": "2.11.0", "numpy": "2.5.2", "transformers": "5.17.0"}
VERSIONS = {"Python": "3.12.1", **PINS, "torch": "2.11.0+cpu"}


def file_of(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


class TestSize:
    def test_tree_and_wheels_together_are_below_the_limit(self, tmp_path):
        tree = [file_of(tmp_path / "code.py", 2 * MEBIBYTE)]
        wheels = [file_of(tmp_path / "a.whl", 3 * MEBIBYTE), file_of(tmp_path / "b.whl", MEBIBYTE)]
        row = tool.size_row(tree, wheels, limit_mib=6.5)
        assert row.passed == 1
        assert row.failed == 0
        assert "tree 2.0 MiB, wheels 4.0 MiB: 6.0 of at most 6.5 MiB" in row.summary
        row = tool.size_row(tree, wheels, limit_mib=6)
        assert row.passed == 0
        assert row.failed == 1

    def test_the_tree_is_what_git_does_not_ignore(self, tmp_path):
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        (tmp_path / ".gitignore").write_text("/results/\n")
        file_of(tmp_path / "results/large.bin", MEBIBYTE)
        file_of(tmp_path / "tracked.py", 10)
        file_of(tmp_path / "gone.py", 10)
        subprocess.run(["git", "-C", tmp_path, "add", "tracked.py", "gone.py"], check=True)
        (tmp_path / "gone.py").unlink()
        file_of(tmp_path / "neu ü.py", 10)
        names = [path.name for path in tool.tree_files(tmp_path)]
        assert sorted(names) == [".gitignore", "neu ü.py", "tracked.py"]

    def test_this_tree_alone_is_far_below_it(self):
        if not (ROOT / ".git").exists():
            pytest.skip("no clone")
        assert tool.size_row(tool.tree_files(ROOT), []).passed == 1


class TestVersions:
    def test_those_of_the_image(self):
        row = tool.environment_row(VERSIONS, PINS, 1.0)
        assert "torch 2.11.0+cpu" in row.summary
        assert "not the image" not in row.summary

    @pytest.mark.parametrize(
        ("name", "version"),
        [
            ("Python", "3.11.7"),
            ("numpy", "2.4.1"),
            ("torch", "2.13.0+cpu"),
            ("transformers", "5.23.0"),
        ],
    )
    def test_others_are_named(self, name, version):
        row = tool.environment_row({**VERSIONS, name: version}, PINS, 1.0)
        assert (
            f"not the image: {name} {version} for {({**PINS, 'Python': '3.12'})[name]}"
            in row.summary
        )

    def test_the_pins_name_what_is_compared(self):
        pins = {pin.name for pin in tool.requirements_in(tool.IMAGE.pins)}
        assert pins >= set(tool.COMPARED)


class TestCounts:
    def test_a_check_without_time_left_has_failed(self, tmp_path):
        switches = {"switches": [{"advice": "not tried", "why": "no time left"}]}
        checks = [
            {"verdict": "PASS", "sentence": "", "numbers": {}},
            {"verdict": "FAIL", "sentence": "no end within 240 s", "numbers": {}},
            {"verdict": "SKIP", "sentence": "needs a GPU", "numbers": {}},
            {"verdict": "SKIP", "sentence": "no time left: 3 s of at least 10", "numbers": {}},
            {"verdict": "PASS", "sentence": "1 of 2 tried", "numbers": switches},
        ]
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"checks": checks}))
        assert tool.count_checks(report) == tool.Counts(passed=1, failed=3, skipped=1)

    def test_tests_by_their_report(self, tmp_path):
        report = tmp_path / "tests.xml"
        report.write_text(
            '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
        )
        assert tool.count_tests(report) == tool.Counts(passed=3, failed=3, skipped=3)


class TestSteps:
    def step(self, code: str, seconds: float = 60.0) -> tool.Step:
        return tool.Step(
            "a step", ["-c", code, "{out}/r.json"], seconds, "r.json", tool.count_checks
        )

    def test_counts_and_log(self, tmp_path):
        write = "import sys; print('hello'); open(sys.argv[1], 'w').write('{\"checks\": []}')"
        row = tool.run_step(self.step(write), Path(sys.executable), tmp_path)
        assert row.passed == 0
        assert row.failed == 0
        assert row.skipped == 0
        assert (tmp_path / "a step.log").read_text() == "hello\n"

    @pytest.mark.parametrize(
        ("code", "seconds", "end"),
        [
            ("raise SystemExit(3)", 60.0, "ended with 3"),
            ("import time; time.sleep(60)", 0.5, "no end within"),
        ],
    )
    def test_one_that_leaves_no_report_has_failed(self, tmp_path, code, seconds, end):
        row = tool.run_step(self.step(code, seconds), Path(sys.executable), tmp_path)
        assert row.failed == 1
        assert end in row.summary

    def test_what_is_run_is_there(self):
        for step in tool.steps(2):
            for word in step.command:
                if word.startswith(("tests/", "tools/")):
                    assert (ROOT / word).exists(), word

    def test_the_table_has_a_row_a_step(self):
        rows = [tool.Row("size", "small", passed=1), tool.Row("unit", "tests", 8, 2, 3, 61.4)]
        lines = tool.table(rows).splitlines()
        assert lines[-1] == "| unit | tests | 8 | 2 | 3 | 61 |"
        assert len(lines) == 4


def test_the_program_ends_with_1_if_a_step_failed(tmp_path, monkeypatch, capsys):
    def prepare(rows: list[tool.Row]) -> Path:
        rows.append(tool.Row("size", "too large", failed=1))
        return python_of(tmp_path)

    monkeypatch.setattr(tool, "prepare", prepare)
    monkeypatch.setattr(tool, "steps", lambda workers: [])
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "--out", str(tmp_path / "out")])
    assert tool.main() == 1
    assert "FAIL (size)" in capsys.readouterr().out
    assert "| size | too large | 0 | 1 | 0 | 0 |" in (tmp_path / "out/table.md").read_text()
