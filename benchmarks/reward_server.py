"""Print what the reward service costs: latency and samples/s of the bare model, of Triton, and through the front door.

python benchmarks/reward_server.py                                            (a tiny random model; a minute or two)
python benchmarks/reward_server.py --batch 1 --length 8 --clients 64          (64 clients at the same time)
python benchmarks/reward_server.py --trunk TRUNK --head HEAD.safetensors --batch 64 --length 128 --calls 3

The bare model is loaded a second time, in this process. The three take turns, so that a busy machine slows all of them
alike; with several clients the bare model still gets one call after the other. Every answer is compared with the bare
model's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from reinforce_rl.rewards import wire
from reinforce_rl.utils.net import free_port

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 128  # of the tiny model
READY_SECONDS = 600.0
CALL_SECONDS = 3600.0


@dataclass
class Way:
    """One way to have samples scored, and what it took.

    Attributes:
        name: for the table.
        calls: makes a function that scores the batch; one for each client.
        latencies: seconds of each call.
        seconds: wall time of all rounds.
        cpu_seconds: of client, server and all that it started, in all rounds.
    """

    name: str
    calls: Callable[[], Callable[[], np.ndarray]]
    clients: int
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def run(self, calls: int, expected: np.ndarray, processes: list[psutil.Process]) -> None:
        """One round: `calls` calls of each client."""
        failures: list[Exception] = []

        def client() -> None:
            try:
                call = self.calls()
                for _ in range(calls):
                    start = time.perf_counter()
                    rewards = call()
                    self.latencies.append(time.perf_counter() - start)
                    np.testing.assert_allclose(rewards, expected, atol=1e-4)
            except Exception as error:  # a thread's own would be lost
                failures.append(error)

        threads = [threading.Thread(target=client) for _ in range(self.clients)]
        start, cpu = time.perf_counter(), cpu_seconds(processes)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += cpu_seconds(processes) - cpu
        if failures:
            raise failures[0]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Of these processes, since each began."""
    return sum(
        times.user + times.system for times in (process.cpu_times() for process in processes)
    )


def http_call(
    address: int | str, tokens: np.ndarray, lengths: np.ndarray
) -> Callable[[], np.ndarray]:
    """Over a connection to a port or to a Unix socket that stays open, in binary."""
    import tritonclient.http as triton

    inputs = [
        triton.InferInput(wire.TOKENS, list(tokens.shape), "INT64"),
        triton.InferInput(wire.SEQUENCE_LENGTHS, list(lengths.shape), "INT64"),
    ]
    inputs[0].set_data_from_numpy(tokens)
    inputs[1].set_data_from_numpy(lengths)
    outputs = [triton.InferRequestedOutput(key) for key in (wire.REWARDS, wire.STATUS)]
    body, json_size = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    headers = {wire.HEADER_LENGTH: str(json_size), "Content-Type": "application/octet-stream"}
    connection = http.client.HTTPConnection(
        "127.0.0.1", address if isinstance(address, int) else 80, CALL_SECONDS
    )
    if isinstance(address, str):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(CALL_SECONDS)
        connection.sock.connect(address)

    def call() -> np.ndarray:
        connection.request("POST", f"/v2/models/{wire.DEFAULT_NAME}/infer", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {data[:300]!r}")
        length = int(answer.headers[wire.HEADER_LENGTH])
        parsed = triton.InferenceServerClient.parse_response_body(data, header_length=length)
        rewards = parsed.as_numpy(wire.REWARDS)
        assert rewards is not None
        return rewards[:, 0]

    return call


@contextlib.contextmanager
def served(
    trunk: Path, head: Path, folder: Path, micro_batch: int, batch: int
) -> Iterator[tuple[int, str, list[psutil.Process]]]:
    """A server of its own: the front door's port, Triton's socket, and the server's processes."""
    port = free_port("127.0.0.1")
    ready = folder / "ready.json"
    command = [sys.executable, str(ROOT / "examples" / "serve_reward_model.py")]
    command += [f"reward_model.restore_from_path={trunk}", f"reward_model.head_path={head}"]
    command += [
        f"inference.port={port}",
        f"inference.ready_file={ready}",
        f"inference.micro_batch_size={micro_batch}",
    ]
    command += [f"inference.max_batch_size={max(batch, 256)}", "log_level=warning"]
    log = folder / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not ready.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server did not become ready:\n{log.read_text(encoding='utf-8')[-3000:]}"
                )
            time.sleep(0.1)
        processes = [
            psutil.Process(server.pid),
            *psutil.Process(server.pid).children(recursive=True),
        ]
        tritonserver = next(process for process in processes if process.name() == "tritonserver")
        yield (
            port,
            next(str(c.laddr) for c in tritonserver.net_connections("unix") if c.laddr),
            processes,
        )
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def tiny_model(folder: Path) -> tuple[Path, Path]:
    """A random trunk and head."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.models import tiny_llama_folder

    from reinforce_rl.megatron.model.reward_head import RewardHead

    trunk = tiny_llama_folder(folder / "trunk", vocab_size=VOCAB_SIZE, max_positions=1024)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
    RewardHead(weight, torch.tensor(0.5), "mean").save(folder / "head.safetensors")
    return trunk, folder / "head.safetensors"


def show(ways: list[Way], batch: int) -> None:
    table = Table()
    titles = (
        "calls",
        "p50, ms",
        "p90, ms",
        "p99, ms",
        "samples/s",
        "CPU, ms a call",
        "p50, ratio",
        "CPU, ratio",
    )
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right")
    base = ways[0]
    for way in ways:
        calls = len(way.latencies)
        p50, p90, p99 = (1000 * np.percentile(way.latencies, q) for q in (50, 90, 99))
        cells = [*(f"{p:.2f}" for p in (p50, p90, p99)), f"{batch * calls / way.seconds:.1f}"]
        cpu, base_cpu = (
            1000 * measured.cpu_seconds / len(measured.latencies) for measured in (way, base)
        )
        # The system counts CPU time in ticks of 10 ms; a few small calls may take none.
        of_cpu = f"{cpu / base_cpu:.2f}" if base_cpu else "-"
        ratios = [f"{p50 / 1000 / np.percentile(base.latencies, 50):.2f}", of_cpu]
        table.add_row(way.name, str(calls), *cells, f"{cpu:.2f}", *ratios)
    Console(width=119).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trunk", type=Path, help="Hugging Face folder; default: a tiny random Llama"
    )
    parser.add_argument("--head", type=Path, help="its head")
    parser.add_argument("--batch", type=int, default=64, help="samples a request")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences in one forward pass")
    parser.add_argument("--clients", type=int, default=1, help="at the same time")
    parser.add_argument("--calls", type=int, default=20, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    args = parser.parse_args()
    if (args.trunk is None) != (args.head is None):
        parser.error("--trunk and --head belong together")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.reward_model.scorer import Batching, load_reward_model

    with tempfile.TemporaryDirectory() as name, parallel_mesh() as mesh:
        folder = Path(name)
        trunk, head = (args.trunk, args.head) if args.trunk else tiny_model(folder)
        scorer = load_reward_model(
            trunk, head, mesh, batching=Batching(micro_batch_size=args.micro_batch)
        )
        rng = np.random.default_rng(0)
        tokens = rng.integers(3, scorer.vocab_size, (args.batch, args.length), dtype=np.int64)
        lengths = np.full((args.batch, 1), args.length, np.int64)
        rows = tokens.tolist()

        def bare() -> np.ndarray:
            return np.asarray(scorer.score(rows), np.float32)

        expected = bare()
        with served(trunk, head, folder, args.micro_batch, args.batch) as (
            front_port,
            triton_socket,
            server,
        ):
            ways = [
                Way("bare model", lambda: bare, 1),
                Way("Triton", lambda: http_call(triton_socket, tokens, lengths), args.clients),
                Way("front door", lambda: http_call(front_port, tokens, lengths), args.clients),
            ]
            processes = [psutil.Process(), *server]
            for way in ways:  # the first calls of each are not counted
                way.run(1, expected, processes)
                way.latencies.clear()
                way.seconds = 0.0
                way.cpu_seconds = 0.0
            for _ in range(args.rounds):
                for way in ways:
                    way.run(args.calls, expected, processes)
    print(f"{args.batch} samples of {args.length} tokens a request, {args.clients} clients")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    show(ways, args.batch)


if __name__ == "__main__":
    main()
