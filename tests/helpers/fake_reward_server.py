"""The reward server's protocol without Triton, with faults that a real server rarely has.

As a script, `fake_reward_server.py inference.port=N`, it only introduces itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import sys
import threading
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.fake_http import FakeHttpServer


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


def sequences_of(inputs: list[dict[str, Any]], tail: bytes) -> list[list[int]]:
    """Return the token ids of a binary request that has the input `tokens`."""
    import numpy as np

    arrays = []
    for tensor in inputs:
        size = tensor["parameters"]["binary_data_size"]
        arrays.append(np.frombuffer(tail[:size], np.int64).reshape(tensor["shape"]))
        tail = tail[size:]
    tokens, lengths = arrays
    return [row[: length[0]].tolist() for row, length in zip(tokens, lengths, strict=True)]


class FakeRewardServer(FakeHttpServer):
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
        self.headers: list[Message] = []  # of each call
        super().__init__(self._reply, port)

    def _reply(self, path: str, headers: Message, body: bytes) -> tuple:
        if not path.endswith("/infer"):
            text = "a small sample was scored"
            return 200, {"name": "triton", "extensions": [], "text": text}
        json_length = int(headers.get("Inference-Header-Content-Length", len(body)))
        request = json.loads(body[:json_length])
        if "reward_server_info" in path:
            reply = (200, {"outputs": [{"name": "info", "data": [self.info.to_json()]}]})
        else:
            reply = self._call(request, body[json_length:])
            self.calls += 1
            self.headers.append(headers)
            self.gate.wait(60)
        code, values, *others = reply
        echoed = {
            "X-Request-ID": headers.get("X-Request-ID", ""),
            "X-Request-Digest": hashlib.sha256(body).hexdigest(),
        }
        return code, {"id": request.get("id", ""), **values}, {**echoed, **dict(*others)}

    def _call(self, request: dict[str, Any], tail: bytes) -> tuple:
        from reinforce_rl.rewards.base import STATUS_INTERNAL, STATUS_OK

        if self.score is None:
            return self.answers[min(self.calls, len(self.answers) - 1)]
        sequences = sequences_of(request["inputs"], tail)
        self.requests.append(sequences)
        rewards = [self.score(sequence) for sequence in sequences]
        return answer(
            rewards,
            [STATUS_INTERNAL if math.isnan(reward) else STATUS_OK for reward in rewards],
        )


if __name__ == "__main__":
    ports = [
        argument.split("=")[1] for argument in sys.argv if argument.startswith("inference.port=")
    ]
    print("fake reward server is starting", flush=True)
    if "fail" in sys.argv:
        print("the fake reward server was told to fail", flush=True)
        sys.exit(3)
    FakeRewardServer(port=int(ports[-1]))
    signal.pause()
