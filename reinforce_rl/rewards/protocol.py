"""What travels between reward server and client: names, types, and the server's description of itself.

Both sides import this file, and it imports neither. The transport is KServe v2 over HTTP, so that any such client can
take part.

Inputs of the reward model, one of the three forms:
    tokens            INT64 [N, S], right-padded, with sequence_lengths INT64 [N, 1]
    sentences         BYTES [N, 1], UTF-8
    prompts           BYTES [N, 1], UTF-8, with responses BYTES [N, 1], and these where they are known:
                      messages BYTES [N, 1], JSON, a list of {role, content}, or empty for a plain prompt
                      metadata BYTES [N, 1], JSON, the other fields of the prompt's line
                      finished INT64 [N, 1], 0 for a response that was cut, else 1
Outputs:
    rewards           FP32 [N, 1], NaN where a sample failed
    status            INT32 [N, 1], the STATUS_ constants of `rewards/base.py`
    attributes        FP32 [N, K], NaN where a sample failed; only of a server whose description names attributes

A request has an `id` of its own in its JSON, which comes back in the answer's, and an answer bears the digest of the
request's body in the header REQUEST_DIGEST: an answer to another request, or to one that was changed on its way, is
never taken for the right one.

The description is the answer of a second model, always called `reward_server_info`, to a request without inputs: one
BYTES [1], a JSON object. Its name does not depend on the reward model's, so that a client with a wrong name can be
told the right one. It has its own process and thread, so it answers while the reward model is busy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.rewards import base
from reinforce_rl.utils.choices import TEXT_FORM, TOKENS_FORM

PROTOCOL_VERSION = 2  # 1 had no digests
DEFAULT_NAME = "reward_model"
DEFAULT_PORT = 5555

TOKENS = "tokens"
SEQUENCE_LENGTHS = "sequence_lengths"
SENTENCES = "sentences"
PROMPTS = "prompts"
RESPONSES = "responses"
MESSAGES = "messages"
METADATA = "metadata"
FINISHED = "finished"
REWARDS = "rewards"
STATUS = "status"
ATTRIBUTES = "attributes"

# Inputs by name: the type, and elements of a sample; -1: as many tokens as the request says.
INPUTS = {name: ("BYTES", 1) for name in (SENTENCES, PROMPTS, RESPONSES, MESSAGES, METADATA)}
INPUTS |= {TOKENS: ("INT64", -1), SEQUENCE_LENGTHS: ("INT64", 1), FINISHED: ("INT64", 1)}
TEXT_REQUIRED = frozenset({PROMPTS, RESPONSES})
TEXT_OPTIONAL = frozenset({MESSAGES, METADATA, FINISHED})

INFO_MODEL = "reward_server_info"
INFO_OUTPUT = "info"

HEADER_LENGTH = "Inference-Header-Content-Length"  # of the JSON before binary tensors
REQUEST_ID = "X-Request-ID"  # the client's name for a request, in both sides' logs
REQUEST_DIGEST = "X-Request-Digest"  # of an answer: SHA-256 of the body that the server received, in hexadecimal

MAX_RETRY_SECONDS = 60  # the latest time to come back that a server names, and that a client believes


class OtherVersion(ValueError):
    """The other side speaks another version of the protocol."""


@dataclass(frozen=True)
class ServerInfo:
    """What a reward server says of itself.

    Attributes:
        name: the reward model's name in URLs.
        max_batch_size: samples in one request.
        max_length: tokens in one sample; None from a server of a function, as the next two.
        vocab_size: token ids are 0 .. vocab_size-1.
        tokenizer: fingerprint of the tokenizer whose ids the model reads.
        deterministic: a request is scored apart from those of other clients.
        add_special_tokens: special tokens are added to `sentences`.
        details: anything else that tells one reward model from another (trunk, head, pooling ...).
        attributes: names of the K scores that the reward is merged from, in the order of the output `attributes`;
            empty where there is none.
        protocol: version of this file's contract.
        input_forms: what a trainer may send, of TOKENS_FORM and TEXT_FORM, the server's preference first.
        max_request_bytes: of one request's body; None from a server that does not say.
    """

    name: str
    max_batch_size: int
    max_length: int | None
    vocab_size: int | None
    tokenizer: TokenizerInfo | None
    deterministic: bool
    add_special_tokens: bool
    details: dict[str, Any] = field(default_factory=dict)
    attributes: list[str] = field(default_factory=list)
    protocol: int = PROTOCOL_VERSION
    input_forms: tuple[str, ...] = (TOKENS_FORM,)
    max_request_bytes: int | None = None

    def to_json(self) -> str:
        """As sent by the server."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ServerInfo:
        """Inverse of `to_json`; keys of a later version are ignored.

        Raises:
            ValueError: it is not such a description.
            OtherVersion: it is one of another version of the protocol.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or "protocol" not in values:
            raise ValueError("no reward server's description")
        if values["protocol"] != PROTOCOL_VERSION:
            raise OtherVersion(
                f"speaks version {values['protocol']} of the protocol, this client version {PROTOCOL_VERSION}: use a "
                "server and a client of the same release of reinforce_rl"
            )
        known = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        try:
            if known["tokenizer"] is not None:
                known["tokenizer"] = TokenizerInfo.from_dict(known["tokenizer"])
            known["input_forms"] = tuple(known.get("input_forms", (TOKENS_FORM,)))
            return cls(**known)
        except (TypeError, KeyError) as error:
            raise ValueError(f"an incomplete description: {error}") from error

    def differences(self, other: ServerInfo, here: str, there: str) -> list[str]:
        """One sentence for each field that tells two servers apart.

        Args:
            other: the second.
            here, there: where or when the first and the second were seen.
        """
        mine, theirs = asdict(self), asdict(other)
        return [f"{key}: {mine[key]} {here}, {theirs[key]} {there}" for key in mine if mine[key] != theirs[key]]


def check_inputs(names: set[str], input_forms: Sequence[str]) -> None:
    """Raises ValueError unless inputs of these names make a request of one form that a server reads."""
    is_text = TEXT_REQUIRED <= names <= TEXT_REQUIRED | TEXT_OPTIONAL
    is_tokens = names in ({SENTENCES}, {TOKENS, SEQUENCE_LENGTHS})
    form = TEXT_FORM if is_text else TOKENS_FORM if is_tokens else None
    if form not in input_forms and (names or input_forms):
        read = " or ".join(input_forms) or "no input"
        raise ValueError(f"this model reads {read}; this request holds {sorted(names)}, see docs/reward-server.md")


def check_answer(rewards: Any, status: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards float32 [N] and statuses int32 [N] of a server's answer; NaN wherever a sample has no score.

    Raises:
        ValueError: the answer is not what the protocol says.
    """
    for key, array, dtype in ((REWARDS, rewards, np.float32), (STATUS, status, np.int32)):
        if array is None:
            raise ValueError(f"no '{key}'")
        if array.dtype != dtype or array.shape != (count, 1):
            raise ValueError(
                f"'{key}' is {array.dtype} {list(array.shape)}; expected {np.dtype(dtype).name} [{count}, 1]"
            )
    values, codes = rewards[:, 0].copy(), status[:, 0].copy()
    unknown = sorted(set(codes.tolist()) - set(base.STATUS_TEXT))
    if unknown:
        raise ValueError(f"unknown status {unknown}")
    codes[(codes == base.STATUS_OK) & ~np.isfinite(values)] = base.STATUS_NOT_FINITE
    values[codes != base.STATUS_OK] = np.nan
    return values, codes


def check_attributes(attributes: Any, status: np.ndarray, count: int) -> np.ndarray:
    """Attributes float32 [N, K] of a server's answer; NaN wherever a sample has no score.

    Args:
        attributes: as received.
        status: int32 [N], from `check_answer`.
        count: K.

    Raises:
        ValueError: the answer is not what the protocol says.
    """
    expected = (len(status), count)
    if attributes is None or attributes.dtype != np.float32 or attributes.shape != expected:
        found = "missing" if attributes is None else f"{attributes.dtype} {list(attributes.shape)}"
        raise ValueError(f"'{ATTRIBUTES}' is {found}; expected float32 {list(expected)}")
    return np.where(status[:, None] == base.STATUS_OK, attributes, np.nan).astype(np.float32)
