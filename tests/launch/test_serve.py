"""A reward server is built from its configuration."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.chat_templates import write_chat_tokenizer

from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.data.rendering import ChatRenderer, TemplateOptions
from reinforce_rl.launch import serve
from reinforce_rl.reward_model.data import encode_sample
from reinforce_rl.rewards.base import TextSample

MOODY = "{{ mood | default('calm') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
DATED = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
MESSAGES = ({"role": "user", "content": "hi <|im_end|>"},)


def served(monkeypatch, folder, **keys: Any) -> tuple[TemplateOptions, dict[str, Any]]:
    """Return the server's template options and its description of the model."""
    calls = []
    monkeypatch.setattr(serve, "RewardServer", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(
        "reinforce_rl.reward_model.scorer.reward_model_identity", lambda *_: {"trunk": "tiny"}
    )
    cfg = ServeRewardModelConfig.model_validate(
        {"reward_model": {"restore_from_path": str(folder), **keys}}
    )
    scorer: Any = SimpleNamespace()
    serve._server_of(cfg, scorer, scorer, None)
    return calls[0]["template"], calls[0]["details"]


@pytest.mark.parametrize(
    ("template", "keys", "arguments"),
    [
        (MOODY, {}, {}),
        (MOODY, {"chat_template_kwargs": {"mood": "merry"}}, {"mood": "merry"}),
        (MOODY, {"sanitize_control_tokens": True}, {"sanitize_control_tokens": True}),
        (DATED, {"chat_template_date": "2024-02-05"}, {}),
        (DATED, {}, {}),
    ],
)
def test_the_template_keys_reach_the_rendering_and_the_description(
    tmp_path, monkeypatch, template, keys, arguments
):
    tokenizer = write_chat_tokenizer(tmp_path, template)
    stopped = type("Stopped", (date,), {"today": classmethod(lambda cls: date(2024, 2, 6))})
    monkeypatch.setattr("reinforce_rl.config.template.date", stopped)
    options, details = served(monkeypatch, tmp_path, **keys)
    if template == DATED:
        day = keys.get("chat_template_date", "2024-02-06")
        assert details == {"trunk": "tiny", "chat_template_date": day}
        template = template.replace(
            "{{ strftime_now('%d %B %Y') }}", f"{date.fromisoformat(day):%d %B %Y}"
        )
    else:
        assert details == {"trunk": "tiny", **keys}
    conversation = [*MESSAGES, {"role": "assistant", "content": "yes"}]
    expected = tokenizer.apply_chat_template(
        conversation, chat_template=template, return_dict=False, **arguments
    )
    sample = TextSample("unused", "yes", {}, MESSAGES)
    assert encode_sample(ChatRenderer(tokenizer, options), sample) == expected
