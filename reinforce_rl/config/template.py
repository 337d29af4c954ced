"""Chat-template keys, shared by prompts, reward-model training and reward serving."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from reinforce_rl.config.base import Fields, Section, Text, key
from reinforce_rl.data.rendering import TemplateOptions, reads_date


class TemplateConfig(Section):
    chat_template_kwargs: Fields = key(
        {},
        "arguments of the chat template, such as enable_thinking: false; a record's column of "
        "this name wins",
        details=". See [data.md](data.md#what-the-chat-template-gets)",
    )
    chat_template_date: Text | None = key(
        None,
        "today's date for chat templates, YYYY-MM-DD; null: the day of the first start, which is "
        "recorded",
        details=". See [data.md](data.md#todays-date-in-a-template)",
    )
    sanitize_control_tokens: bool = key(
        False,
        "treat control tokens within messages as text, as this argument of apply_chat_template "
        "does in transformers",
        details=". See [data.md](data.md#control-tokens-in-messages)",
    )

    def freeze_date(self, tokenizer_folder: str | Path, recorded: str | None = None) -> None:
        """Set the template date to the recorded one, else to today, if the template reads a date
        and none is set.
        """
        if self.chat_template_date is None and reads_date(tokenizer_folder):
            self.chat_template_date = recorded or date.today().isoformat()

    def template_options(self, section: str) -> TemplateOptions:
        """Return the options; messages name them with the prefix `section`, such as
        "model.data.".
        """
        return TemplateOptions(
            kwargs=self.chat_template_kwargs,
            date=self.chat_template_date,
            sanitize_control_tokens=self.sanitize_control_tokens,
            section=section,
        )
