"""Print what clients of a reward server get: requests/s and latency of 1, 8 and 64 clients, and their memory.

python benchmarks/reward_client.py
python benchmarks/reward_client.py --trees . ../before --rounds 5     (two checkouts of this project, in alternation)

The server is a real one with a toy scorer, on this machine, of the same tree as the clients; it is started anew in
each round. Each client is a `RemoteGPTRMClient` in a thread of its own, and asks for the scores of 8 samples of 16
tokens, one request after the other. Every score is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 8
LENGTH = 16
ROUND_SECONDS = 900.0


def measure(tree: Path, clients: list[int], requests: int) -> dict[str, dict[str, float]]:
    """One round, in a process of the tree."""
    sys.path.insert(0, str(tree / "tests"))
    import torch
    from helpers.serve_toy_scorer import toy_score
    from helpers.toy_server import ToyServer

    from reinforce_rl.rewards.base import RewardRequest
    from reinforce_rl.rewards.client import RemoteGPTRMClient

    tokens = torch.arange(4, 4 + SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % 97 + 4
    lengths = torch.full((SAMPLES,), LENGTH)
    request = RewardRequest(tokens, lengths, ("",) * SAMPLES, ("",) * SAMPLES)
    expected = np.asarray([toy_score(row) for row in tokens.tolist()], np.float32).tolist()
    latencies: list[float] = []
    failures: list[Exception] = []

    def ask(port: int, count: int, begin: threading.Barrier) -> None:
        client = RemoteGPTRMClient(port=port, max_in_flight=1, on_wait=lambda _: None)
        try:
            client.infer_rm(request).result()
            begin.wait()
            for _ in range(count):
                start = time.perf_counter()
                found = client.infer_rm(request).result().values.tolist()
                latencies.append(time.perf_counter() - start)
                assert found == expected
        except Exception as error:  # a thread's own would be lost
            failures.append(error)
            begin.abort()
        finally:
            client.close()

    found = {}
    with tempfile.TemporaryDirectory() as name:
        server = ToyServer(Path(name))
        server.start_seconds = ROUND_SECONDS  # a busy machine imports slowly
        server.start()
        try:
            for number in clients:
                latencies.clear()
                begin = threading.Barrier(number + 1)
                args = (server.port, requests // number, begin)
                threads = [threading.Thread(target=ask, args=args) for _ in range(number)]
                for thread in threads:
                    thread.start()
                begin.wait()
                start = time.perf_counter()
                before = time.process_time()
                for thread in threads:
                    thread.join()
                seconds = time.perf_counter() - start
                if failures:
                    raise failures[0]
                found[str(number)] = {
                    "requests/s": len(latencies) / seconds,
                    "p50, ms": 1000 * float(np.percentile(latencies, 50)),
                    "p99, ms": 1000 * float(np.percentile(latencies, 99)),
                    "CPU of the clients, ms a request": 1000
                    * (time.process_time() - before)
                    / len(latencies),
                    "memory of the clients, MB": psutil.Process().memory_info().rss / 1e6,
                }
        finally:
            server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trees", type=Path, nargs="+", default=[ROOT], help="checkouts to compare"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--requests", type=int, default=640, help="of all clients together, in a round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--measure", action="store_true", help="print one round of the first tree as JSON"
    )
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.trees[0], args.clients, args.requests)))
        return
    rounds: dict[Path, list[dict[str, dict[str, float]]]] = {tree: [] for tree in args.trees}
    command = [sys.executable, __file__, "--measure", "--requests", str(args.requests), "--clients"]
    command += [str(number) for number in args.clients]
    for _ in range(args.rounds):
        for tree in args.trees:
            environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
            output = subprocess.run(
                [*command, "--trees", str(tree.resolve())],
                env=environment,
                cwd=tree,  # where `python -m` looks first
                stdout=subprocess.PIPE,
                check=True,
                timeout=ROUND_SECONDS,
            ).stdout
            rounds[tree].append(json.loads(output.splitlines()[-1]))
    print(
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}; median (least to most) of {args.rounds} rounds"
    )
    for number in map(str, args.clients):
        for key in rounds[args.trees[0]][0][number]:
            for tree in args.trees:
                values = sorted(found[number][key] for found in rounds[tree])
                text = f"{np.median(values):8.1f} ({values[0]:.1f} to {values[-1]:.1f})"
                print(f"{number:>3} clients  {key:<34} {tree!s:<24} {text}")


if __name__ == "__main__":
    main()
