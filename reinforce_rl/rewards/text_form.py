"""The form of a request that carries texts: from samples to the arrays of `protocol.py`, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforce_rl.rewards import base, protocol
from reinforce_rl.rewards.base import TextSample

MAX_DEPTH = 64  # of lists and objects; what is read here is written and read again by processes of functions


def text_arrays(samples: Sequence[TextSample]) -> dict[str, np.ndarray]:
    """Every input of the form, each [N, 1]; always the same ones, so that Triton can merge requests."""
    columns = {
        protocol.PROMPTS: [sample.prompt for sample in samples],
        protocol.RESPONSES: [sample.response for sample in samples],
        protocol.MESSAGES: [json.dumps(list(sample.messages)) if sample.messages else "" for sample in samples],
        protocol.METADATA: [json.dumps(dict(sample.record)) for sample in samples],
    }
    arrays = {}
    for name, texts in columns.items():
        # Half of a surrogate pair becomes bytes that the server refuses, for this sample alone.
        arrays[name] = np.array([text.encode("utf-8", "surrogatepass") for text in texts], object).reshape(-1, 1)
    arrays[protocol.FINISHED] = np.array([int(sample.finished) for sample in samples], np.int64).reshape(-1, 1)
    return arrays


def read_samples(request: Mapping[str, np.ndarray]) -> tuple[list[TextSample | None], np.ndarray]:
    """Each sample, None where it cannot be read, and a status for each, int32 [N]."""
    count = request[protocol.PROMPTS].shape[0]
    columns = {name: array.reshape(count).tolist() for name, array in request.items()}
    samples: list[TextSample | None] = []
    status = np.zeros(count, np.int32)
    for row in range(count):
        sample = None
        try:
            sample = _read({name: column[row] for name, column in columns.items()})
        except UnicodeDecodeError:
            status[row] = base.STATUS_BAD_TEXT
        except (ValueError, RecursionError):
            status[row] = base.STATUS_BAD_PROMPT
        samples.append(sample)
    return samples, status


def _read(values: Mapping[str, Any]) -> TextSample:
    messages = _json(values.get(protocol.MESSAGES), list)
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("a message is no object with a role")
    if not all(isinstance(m.get("content"), str) for m in messages):
        raise ValueError("a message has no text as its content")
    return TextSample(
        prompt=_text(values[protocol.PROMPTS]),
        response=_text(values[protocol.RESPONSES]),
        record=_json(values.get(protocol.METADATA), dict),
        messages=tuple(messages),
        finished=values.get(protocol.FINISHED, 1) != 0,
    )


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else bytes(raw).decode("utf-8")


def _json(raw: Any, kind: type) -> Any:
    """A JSON list or object; an empty one for an empty text."""
    text = "" if raw is None else _text(raw)
    value = json.loads(text) if text else kind()
    if not isinstance(value, kind):
        raise ValueError(f"found JSON of type {type(value).__name__}; expected {kind.__name__}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"found JSON that is nested deeper than {MAX_DEPTH}")
    return value


def _depth(node: Any) -> int:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return 1 + max(map(_depth, children), default=0)
