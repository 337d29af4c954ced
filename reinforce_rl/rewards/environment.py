"""What an environment is: it answers the policy's answers until the episode ends.

An environment is named as a reward function is, by a dotted name. A function is called with each
answer of an episode,

    def calculator(answer: str, record: dict, rng: random.Random) -> str | None: ...

and a class makes an object for each episode, which is called with each answer:

    class GuessANumber:
        def __init__(self, record: dict, rng: random.Random): ...
        def __call__(self, answer: str) -> str | None: ...

Both may take keyword arguments, from `environment.kwargs`. An episode runs in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
# Roles of messages that an environment may write.
ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Reply:
    """What an environment says to an answer; it may also return `messages` alone.

    `messages` are a text, which is a user's, one message as in OpenAI's form, such as
    {"role": "tool", "content": "4"}, a list of messages, or None, which ends the episode.
    """

    messages: str | Message | Sequence[Message] | None = None
    reward: float = 0.0  # of this turn; an episode's reward is the sum over its turns
    is_end: bool = False  # the episode ends, whatever the messages are


def normalized(reply: object) -> dict[str, Any]:
    """Return a reply as messages (a list), reward and is_end.

    Raises TypeError or ValueError, which say what was returned and what is expected.
    """
    if not isinstance(reply, Reply):
        reply = Reply(reply)  # type: ignore[arg-type]
    messages = reply.messages
    if messages is None:
        messages = []
    elif isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, Mapping):
        messages = [messages]
    elif not isinstance(messages, list | tuple):
        raise TypeError(
            f"returned a {type(messages).__name__}; expected a text, a message, a list of messages "
            "or None"
        )
    for message in messages:
        _check_message(message)
    reward = float(reply.reward)
    if not math.isfinite(reward):
        raise ValueError(f"returned a reward of {reward}; expected a finite number")
    is_end = reply.is_end or not messages
    return {"messages": [dict(message) for message in messages], "reward": reward, "is_end": is_end}


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"returned a list with a {type(message).__name__}; expected messages, such as "
            '{"role": "tool", "content": "4"}'
        )
    if message.get("role") not in ROLES:
        raise ValueError(
            f"returned a message with role {message.get('role')!r}; expected {', '.join(ROLES)}"
        )
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise TypeError(f"returned a message whose content is a {kind}; expected a text")
