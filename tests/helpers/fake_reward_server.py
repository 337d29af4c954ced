"""The reward server's protocol without Triton, with faults that a real server rarely has.

As a script, `fake_reward_server.py inference.port=N`, it only introduces itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def describe(**changes):
    from reinforce_rl.data.tokenizer import TokenizerInfo
    from reinforce_rl.rewards.wire import ServerInfo

    tokenizer = TokenizerInfo(
        vocab_size=128, vocab_sha256="a" * 64, eos_id=2, chat_template_sha256=None
    )
    values = {
        "name": "reward_model",
        "max_batch_size": 8,
        "max_length": 32,
        "vocab_size": 128,
        "tokenizer": tokenizer,
        "deterministic": True,
        "add_special_tokens": False,
    }
    return ServerInfo(**{**values, **changes})


def answer(rewards: list[float], status: list[int], count: int | None = None) -> tuple[int, dict]:
    shape = [len(rewards) if count is None else count, 1]
    return 200, {
        "model_name": "reward_model",
        "outputs": [
            {"name": "rewards", "datatype": "FP32", "shape": shape, "data": rewards},
            {"name": "status", "datatype": "INT32", "shape": shape, "data": status},
        ],
    }


def sequences_of(body: bytes, header_length: int) -> list[list[int]]:
    """Return the token ids of a binary request that has the input `tokens`."""
    import numpy as np

    arrays = []
    start = header_length
    for tensor in json.loads(body[:header_length])["inputs"]:
        end = start + tensor["parameters"]["binary_data_size"]
        arrays.append(np.frombuffer(body[start:end], np.int64).reshape(tensor["shape"]))
        start = end
    tokens, lengths = arrays
    return [row[: length[0]].tolist() for row, length in zip(tokens, lengths, strict=True)]


class FakeRewardServer:
    """Return `answers` (code, body, optional headers) in turn, repeating the last.

    With `score` it scores token ids instead; NaN is a failed sample. `info` and `gate`, an event
    that calls wait for, may be replaced at any time.
    """

    def __init__(
        self,
        answers: list[tuple] | None = None,
        port: int = 0,
        score: Callable[[list[int]], float] | None = None,
    ):
        self.info = describe()
        self.answers = answers or []
        self.score = score
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[list[list[int]]] = []  # token ids, if it scores
        self.calls = 0
        self.headers: list[dict[str, str]] = []  # of each call
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            digest = ""
            id = ""

            def do_GET(self) -> None:
                self._send(
                    200, {"name": "triton", "extensions": [], "text": "a small sample was scored"}
                )

            def do_POST(self) -> None:
                request = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.digest = hashlib.sha256(request).hexdigest()
                values = json.loads(
                    request[
                        : int(self.headers.get("Inference-Header-Content-Length", len(request)))
                    ]
                )
                self.id = values.get("id", "")
                if "reward_server_info" in self.path:
                    self._send(200, {"outputs": [{"name": "info", "data": [fake.info.to_json()]}]})
                else:
                    if fake.score is not None:
                        code, body, *headers = self._score(request, fake.score)
                    else:
                        code, body, *headers = fake.answers[min(fake.calls, len(fake.answers) - 1)]
                    fake.calls += 1
                    fake.headers.append(dict(self.headers))
                    fake.gate.wait(60)
                    self._send(code, body, *headers)

            def _score(self, request: bytes, score: Callable[[list[int]], float]) -> tuple:
                from reinforce_rl.rewards.base import STATUS_INTERNAL, STATUS_OK

                sequences = sequences_of(
                    request, int(self.headers["Inference-Header-Content-Length"])
                )
                fake.requests.append(sequences)
                rewards = [score(sequence) for sequence in sequences]
                return answer(
                    rewards,
                    [STATUS_INTERNAL if math.isnan(reward) else STATUS_OK for reward in rewards],
                )

            def _send(self, code: int, body: dict, headers: dict[str, str] | None = None) -> None:
                data = json.dumps({"id": self.id, **body}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                echoed = {
                    "X-Request-ID": self.headers.get("X-Request-ID", ""),
                    "X-Request-Digest": self.digest,
                }
                for key, value in {**echoed, **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client was closed meanwhile
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> FakeRewardServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve_forever(self) -> None:
        self._server.serve_forever()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    ports = [
        argument.split("=")[1] for argument in sys.argv if argument.startswith("inference.port=")
    ]
    print("fake reward server is starting", flush=True)
    if "fail" in sys.argv:
        print("the fake reward server was told to fail", flush=True)
        sys.exit(3)
    FakeRewardServer(port=int(ports[-1])).serve_forever()
