"""The dashboard's server by HTTP, and its page and the frozen one in Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from aiohttp import web
from helpers.errors import raises_error
from helpers.rows import write_rows
from playwright.sync_api import expect, sync_playwright

from reinforce_rl.monitoring.compare import compare
from reinforce_rl.monitoring.dashboard import Dashboard, serve
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow, Samples, TokenColumns, write_samples
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.runtime.status import StatusFile

CHROMIUM = "/usr/bin/chromium"
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync"
)
EVIL = (
    "</script></textarea><script>window.hacked = 1</script><img src=x onerror='window.hacked = "
    "1'><b>bold</b>"
)
SECONDS = 60.0


def make_run(folder: Path, steps: int = 20, lr: float = 1e-5, gain: float = 1.0) -> Path:
    """A run whose response to prompt i at step s is "answer i of step s"."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model:\n  optim:\n    lr: {lr}\ntrainer:\n  devices: 2\nnote: '{EVIL[:9]}'\n"
    )
    for step in range(steps + 1):
        log_step(folder, step, gain, validates=step % 10 == 0)
    status = StatusFile(folder, enabled=True)
    status.progress(steps, steps)
    status.end(0)
    return folder


def log_step(folder: Path, step: int, gain: float = 1.0, *, validates: bool = False) -> None:
    logger = JsonlLogger(folder / "metrics.jsonl", resume_step=10**6)

    def row(prompt: int, sample: int, **fields: Any) -> RolloutRow:
        text = f"answer {prompt} of step {step} {EVIL}"
        return RolloutRow(
            step,
            prompt,
            sample,
            f"question {prompt}?",
            text,
            fields.pop("reward"),
            "stop",
            5 + prompt,
            **fields,
        )

    if validates:
        validated = [row(i, 0, reward=gain * step / 10 + i) for i in range(6)]
        write_rows(folder, step, validated, "validation")
        logger.log_metrics({"rewards": gain * step / 10, "reward_std": 1.0}, step, "val/")
    if step:
        rows = []
        for i in range(30):
            rows += [row(i, j, reward=0.1 * j, kl=1.0 - i, advantage=j - 1.0) for j in range(3)]
        tokens = tokens_of(rows) if step % 2 else None
        samples = Samples(rows, tokens)
        write_samples(folder, step, samples)
        metrics = {
            "rewards": gain * step / 10,
            "init_policy_kl": step / 5,
            "grad_norm": 1.0,
            "reward_std": 1.0,
        }
        logger.log_metrics({**metrics, "skipped_step": float(step == 7)}, step, "train/")
        logger.log_metrics({"generate": 2.0, "train_time": 1.0, "step_time": 4.0}, step, "timers/")
        logger.log_metrics({"generate": 2.0}, step, "memory/")
    logger.commit(step)


def tokens_of(rows: list[RolloutRow]) -> TokenColumns:
    """Tokens "an", "<b>", "swer", "an", ...

    The policy finds "<b>" likelier than the generator did.
    """
    lengths = np.array([row.response_length for row in rows])
    ids = np.concatenate([np.arange(length) % 3 for length in lengths])
    policy = np.full(len(ids), -1.0)
    gaps = np.array([0.0, 0.5, -0.25])[ids]
    values = {
        "policy_log_probs": policy,
        "generator_log_probs": policy - gaps,
    }
    values |= {"prompt_tokens": np.zeros(len(rows), int), "response_tokens": ids}
    texts = {0: "an", 1: "<b>", 2: "swer"}
    return TokenColumns({"prompt": np.ones(len(rows), int), "response": lengths}, values, texts)


@contextlib.contextmanager
def dashboard(folder: Path) -> Iterator[int]:
    """A dashboard in its own thread, on a free port."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(Dashboard(folder).application(), shutdown_timeout=1.0)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(SECONDS)

    run(runner.setup())
    run(web.TCPSite(runner, "127.0.0.1", 0).start())
    try:
        yield runner.addresses[0][1]
    finally:
        run(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    make_run(folder / "first")
    name = EVIL[:9].replace("/", "")
    make_run(folder / "grid" / f"lr {name}", lr=1e-4, gain=2.0)
    make_run(tmp_path_factory.getbasetemp() / "secret" / "run", steps=1)
    return folder


@pytest.fixture(scope="module")
def port(results) -> Iterator[int]:
    with dashboard(results) as free_port:
        yield free_port


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, Any, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(body), answer
    return answer.status, body.decode(), answer


class TestServer:
    def test_runs_and_one_of_them(self, port):
        _, listed, _ = ask(port, "/api/runs")
        names = [run["name"] for run in listed["runs"]]
        assert names == ["grid/lr <script>", "first"], "the newest first"
        expected = {
            ("finished", 20, 2.0),
            ("finished", 20, 4.0),
        }
        states = {(run["state"], run["step"], run["reward"]) for run in listed["runs"]}
        assert states == expected
        status, run, _ = ask(port, "/api/run?name=first")
        assert status == 200
        assert "2.500 -> 4.500: +2.000 ± 0.000" in run["verdict"]
        fired = [(alert["kind"], alert["first"]) for alert in run["alerts"]]
        assert fired == [("skipped", 7)]
        assert ask(port, f"/api/run?name=first&stamp={run['stamp']}")[0] == 204
        assert ask(port, "/api/run?name=first&stamp=other")[0] == 200

    def test_samples_of_a_step_and_of_a_prompt(self, port):
        _, answer, _ = ask(port, "/api/samples?name=first&kind=rollouts&step=3")
        assert answer["total"] == 90
        assert answer["rows"][4]["response"] == f"answer 1 of step 3 {EVIL}"
        _, answer, _ = ask(port, "/api/prompt?name=first&kind=validation&prompt=2")
        expected = [f"answer 2 of step {step}" for step in (0, 10, 20)]
        responses = [row["response"].partition(" <")[0] for row in answer["rows"]]
        assert responses == expected

    def test_tokens_of_a_prompt_where_they_were_recorded(self, port):
        assert ask(port, "/api/samples?name=first&kind=rollouts&step=2")[1]["columns"] == []
        columns = ask(port, "/api/samples?name=first&kind=rollouts&step=3")[1]["columns"]
        assert set(columns) == {"token_texts", "policy_log_probs", "generator_log_probs"}
        _, answer, _ = ask(port, "/api/tokens?name=first&kind=rollouts&step=3&prompt=2")
        assert answer["tokens"].keys() == {"2 0", "2 1", "2 2"}
        of_one = answer["tokens"]["2 1"]
        expected = ["an", "<b>", "swer", "an", "<b>", "swer", "an"]
        assert of_one["token_texts"] == expected
        expected = [-1.0, -1.5, -0.75, -1.0, -1.5, -0.75, -1.0]
        assert of_one["generator_log_probs"] == expected

    @pytest.mark.parametrize(
        ("path", "status", "key", "said"),
        [
            ("/api/run?name=absent", 404, "dashboard.run.unknown", "'absent'"),
            ("/api/run?name=../secret/run", 404, "dashboard.run.unknown", "'../secret/run'"),
            ("/api/run?name=/etc", 404, "dashboard.run.unknown", "'/etc'"),
            (
                "/api/samples?name=first&kind=../../secret/run/rollouts&step=1",
                404,
                "dashboard.samples.kind_unknown",
                "'../../secret/run/rollouts'",
            ),
            (
                "/api/samples?name=first&kind=rollouts&step=99",
                404,
                "samples.step.missing",
                "1 to 20",
            ),
            # Errors of HTTP itself have no key.
            ("/api/samples?name=first&kind=rollouts&step=1e1", 400, "", "'1e1'"),
            ("/api/samples?name=first&kind=rollouts", 400, "", "'step'"),
            ("/api/run", 400, "", "'name'"),
            ("/../../etc/passwd", 404, "", "Not Found"),
            ("/first/metrics.jsonl", 404, "", "Not Found"),
        ],
    )
    def test_faults_and_paths_that_lead_out(self, port, path, status, key, said):
        answer_status, answer, _ = ask(port, path)
        assert answer_status == status
        assert answer.get("key", "") == key
        assert said in answer["error"]

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("LOCALHOST:80", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:1", 200),
            ("10.1.2.3", 200),
        ]
        + [
            (name, 421)
            for name in (
                "evil.example",
                "localhost.evil.example:6060",
                "127.0.0.1.evil.example",
                "",
            )
        ],
    )
    def test_another_name_of_this_address_is_refused(self, port, host, status):
        assert ask(port, "/api/runs", Host=host)[0] == status

    def test_the_page_may_load_nothing_from_elsewhere_and_nothing_may_be_written(self, port):
        status, text, answer = ask(port, "/")
        assert status == 200
        assert "http://" not in text
        assert "https://" not in text
        assert "default-src 'none'; script-src 'self';" in answer.headers["Content-Security-Policy"]
        for method in ("POST", "PUT", "DELETE"):
            assert ask(port, "/api/runs", method)[0] == 405

    def test_ctrl_c_ends_it_and_a_folder_with_a_damaged_run_shows_the_others(self, tmp_path):
        make_run(tmp_path / "good", steps=1)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "metrics.jsonl").write_text('{"step": 1}\n{"step": "two"}\n')
        code = (
            "import sys; from reinforce_rl.monitoring.dashboard import serve; "
            "serve(sys.argv[1], port=0)"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                words = process.stdout.readline().split("; ")
                port = int(words[0].rpartition(":")[2])
                names = {run["name"] for run in ask(port, "/api/runs")[1]["runs"]}
                assert names == {"good", "bad"}
                status, answer, _ = ask(port, "/api/run?name=bad")
                assert status == 404
                assert answer["key"] == "metrics.line.invalid"
                assert "line 2" in answer["error"]
                assert ask(port, "/api/run?name=good")[0] == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(SECONDS) == 0
            finally:
                process.kill()

    @pytest.mark.parametrize(
        ("host", "shown"),
        [("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")],
    )
    def test_the_address_that_it_prints_is_its_own(self, tmp_path, host, shown):
        make_run(tmp_path / "good", steps=1)
        code = (
            "import sys; from reinforce_rl.monitoring.dashboard import serve; "
            "serve(*sys.argv[1:], port=0)"
        )
        command = [sys.executable, "-c", code, str(tmp_path), host]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split("; ")[0].split(" on ")[-1]
                assert url.rpartition(":")[0] == f"http://{shown}"
                with urlopen(f"{url}/api/runs", timeout=SECONDS) as response:
                    assert json.load(response)["runs"][0]["name"] == "good"
            finally:
                process.kill()

    def test_no_such_folder(self, tmp_path):
        with raises_error("dashboard.folder.missing", tmp_path / "absent"):
            serve(tmp_path / "absent")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not Path(CHROMIUM).is_file():
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is missing; install Debian's package chromium")
        pytest.skip(f"there is no {CHROMIUM}")
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=OPTIONS.split())
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser, address: str, width: int = 1200, **options: Any) -> Iterator[Any]:
    """Open a page and draw it fully.

    The console must stay empty, and no response's markup may be active.
    """
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    context.set_default_timeout(1000 * SECONDS)
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    assert said == []
    assert page.evaluate("window.hacked") is None
    context.close()


def lines(page, title: str) -> list[dict[str, Any]]:
    """Return what Plotly drew in a chart, without bands and faint lines."""
    code = """title => {
        const charts = [...document.querySelectorAll('.chart')];
        const chart = charts.find(one => one.querySelector('h3').innerText === title);
        const drawn = chart.querySelector('.plot').data.filter(one => one.hoverinfo !== 'skip');
        return drawn.map(({name, x, y, stackgroup}) => ({name, x: [...x], y: [...y], stackgroup}));
    }"""
    return page.evaluate(code, title)


def until(is_so) -> None:
    """Wait without JavaScript's `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.more
def test_every_control_of_one_run(browser, port):
    with opened(browser, f"http://127.0.0.1:{port}/#run=first") as page:
        assert page.text_content("#title") == "first"
        assert "+2.000 ± 0.000" in page.text_content("#verdict")
        assert "gradient was not finite" in page.text_content("#alerts")
        training, validation = lines(page, "Reward")
        assert training["name"] == "training"
        assert training["x"] == list(range(1, 21))
        assert validation["x"] == [0, 10, 20]
        assert validation["y"] == [0, 1, 2]
        stackgroups = {line["stackgroup"] for line in lines(page, "Step time by phase")}
        assert stackgroups == {"one"}
        smooth = training["y"]
        page.fill("#smooth", "0")
        assert lines(page, "Reward")[0]["y"] != smooth
        assert lines(page, "Reward")[0]["y"][4] == 0.5
        page.select_option("#x-axis", "time")
        assert lines(page, "Reward")[0]["x"][0] < 1
        page.click('.chart:has-text("Reward") .chips button:has-text("training")')
        names = [line["name"] for line in lines(page, "Reward")]
        assert names == ["validation"]
        page.click('[aria-label="Logarithmic axis: Gradient norm"]')
        page.click('[aria-label="What it means: Gradient norm"]')
        page.click('[aria-label="Larger: Gradient norm"]')
        assert page.is_visible('.chart.wide p:has-text("norm")')
        page.select_option("#more", "train/skipped_step")
        assert lines(page, "train/skipped_step")[0]["y"][6] == 1
        page.click('[aria-label="Remove: train/skipped_step"]')
        assert page.locator('h3:has-text("train/skipped_step")').count() == 0
        assert page.locator("#settings tr", has_text="model.optim.lr").inner_text().split() == [
            "model.optim.lr",
            "1e-05",
            "1e-06",
        ]
        page.click("#whole summary")
        assert "devices: 2" in page.inner_text("#yaml")

        # Samples: validation with before and after; then a group; then search, sort, one prompt
        # over steps.
        assert page.input_value("#kind") == "validation"
        assert page.input_value("#step") == "20"
        pair = page.locator("#rows .sample").first
        assert f"answer 0 of step 0 {EVIL}" in pair.inner_text()
        assert f"answer 0 of step 20 {EVIL}" in pair.inner_text()
        page.click("#previous")
        expect(page.locator("#rows")).to_contain_text("after, step 10")
        page.select_option("#kind", "rollouts")
        expect(page.locator("#samples-count")).to_contain_text("90 of 90")
        group = page.locator("#rows .sample").first
        assert group.locator(".text:not(.prompt)").count() == 3
        assert "advantage -1" in group.inner_text()
        expect(page.locator("#rows .sample")).to_have_count(20)
        page.click("#more-rows")
        expect(page.locator("#rows .sample")).to_have_count(30)
        page.select_option("#sort", "-response_length")
        assert "prompt 29" in page.locator("#rows .sample").first.inner_text()
        page.fill("#search", "ANSWER 17")
        assert page.inner_text("#samples-count").startswith("3 of 90")
        assert page.locator("mark").first.inner_text() == "answer 17"
        assert page.is_hidden("#colour"), "no tokens of step 20"
        page.fill("#search", "")
        page.click("#previous")
        page.select_option("#colour", "generator")
        expect(page.locator("#scale")).to_contain_text("+0.5")
        tokens = page.locator("#rows .text:not(.prompt)").first.locator(".token")
        expect(tokens).to_have_text((["an", "<b>", "swer"] * 12)[:34])
        shades = [
            tokens.nth(i).evaluate("one => getComputedStyle(one).backgroundColor") for i in range(3)
        ]
        assert shades == [
            "rgba(214, 96, 22, 0)",
            "rgba(20, 120, 200, 0.75)",
            "rgba(214, 96, 22, 0.376)",
        ]
        assert "generator log probs -1.5" in (tokens.nth(1).get_attribute("title") or "")
        page.fill("#search", "ANSWER 17")
        page.select_option("#colour", "")
        page.select_option("#view", "list")
        expect(page.locator("#rows .sample")).to_have_count(3)
        page.click('#rows button:has-text("over steps") >> nth=0')
        expect(page.locator("#rows")).to_contain_text("step 1")
        expect(page.locator("#samples-count")).to_contain_text("60 of 60")
        assert "search=ANSWER+17" in page.url
        assert "prompt=17" in page.url, "the address can be shared"
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert page.input_value("#search") == "ANSWER 17"


@pytest.mark.more
def test_runs_overlaid_by_the_keyboard(browser, port):
    with opened(browser, f"http://127.0.0.1:{port}/#run=first", color_scheme="dark") as page:
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 24)"
        page.focus('#runs input[data-run^="grid"]')
        page.keyboard.press("Space")
        expect(page.locator("#comparison")).to_contain_text("Paired")
        expected = {
            f"{name}, {kind}"
            for name in ("first", "grid/lr &lt;script&gt;")
            for kind in ("training", "validation")
        }
        names = {line["name"] for line in lines(page, "Reward")}
        assert names == expected
        table = page.inner_text("#comparison")
        assert "+2.000 ± 0.000" in table
        assert "1e-05" in table
        assert "trainer.devices" not in table
        page.fill("#runs-filter", "grid")
        assert page.locator("#runs li").count() == 1
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
        )


@pytest.mark.more
def test_the_page_follows_runs_that_appear_grow_and_go(browser, tmp_path):
    with dashboard(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/") as page:
        assert "No run is here yet" in page.inner_text("#empty")
        log_step(tmp_path / "new", 1)
        page.wait_for_selector("#runs li")
        page.wait_for_selector(".chart")
        log_step(tmp_path / "new", 2)
        until(lambda: lines(page, "Reward")[0]["x"] == [1, 2])
        expect(page.locator("#step")).to_have_value("2")
        shutil.rmtree(tmp_path / "new")
        page.wait_for_selector("#empty:visible")
        assert page.locator("#runs li").count() == 0


@pytest.mark.more
def test_a_frozen_report_on_a_narrow_screen_without_a_network(browser, results, tmp_path):
    run_dir = shutil.copytree(results / "first", tmp_path / "first")
    path = write_report(run_dir)
    with opened(browser, path.as_uri(), width=420, offline=True) as page:
        assert page.text_content("#title") == "first"
        assert len(lines(page, "Reward")) == 2
        assert not page.is_visible("#sidebar")
        assert "answer 0 of step 20" in page.inner_text("#rows")
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        page.emulate_media(color_scheme="dark")
        page.select_option("#kind", "rollouts")
        expect(page.locator("#rows")).to_contain_text("advantage")
        assert page.locator("#step option").count() == 5
        assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_a_frozen_comparison(browser, results, tmp_path):
    runs = [results / "first", *(results / "grid").iterdir()]
    compare(runs, tmp_path / "both.html")
    with opened(browser, (tmp_path / "both.html").as_uri(), offline=True) as page:
        assert page.text_content("#title") == "2 runs"
        assert "+2.000 ± 0.000" in page.inner_text("#comparison")
        assert len(lines(page, "Reward")) == 4
