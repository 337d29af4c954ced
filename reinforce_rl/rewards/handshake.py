"""What a trainer sends a reward server, tokens or texts, by what the server says of itself."""

from __future__ import annotations

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards import protocol
from reinforce_rl.rewards.protocol import ServerInfo
from reinforce_rl.utils.choices import AUTO_FORM


def choose_form(info: ServerInfo, place: str, tokenizer: TokenizerInfo, vocab_size: int, form: str) -> str:
    """TOKENS_FORM or TEXT_FORM.

    Args:
        info: the server's description.
        place: HOST:PORT, for messages.
        tokenizer: the actor's.
        vocab_size: the actor can produce ids 0 .. vocab_size-1.
        form: of `INPUT_FORMS`. `auto` sends tokens where they mean the same on both sides, else texts.

    Raises:
        ConfigError: the server does not read this form, or reads other tokens; every difference is named.
    """
    if form != AUTO_FORM and form not in info.input_forms:
        why = {
            protocol.TOKENS_FORM: "it serves a reward function",
            protocol.TEXT_FORM: "its tokenizer has no chat template or no end-of-sequence token",
        }[form]
        raise ConfigError([f"the reward server at {place} does not read {form}, since {why}; set input=auto"])
    if protocol.TEXT_FORM in info.input_forms and (form == protocol.TEXT_FORM or info.tokenizer is None):
        return protocol.TEXT_FORM
    faults = [] if info.tokenizer is None else tokenizer.differences(info.tokenizer)
    if info.vocab_size is not None and vocab_size > info.vocab_size:
        faults.append(f"the actor can produce {vocab_size} token ids, the reward model knows {info.vocab_size}")
    if not faults:
        return protocol.TOKENS_FORM
    if form == AUTO_FORM and protocol.TEXT_FORM in info.input_forms:
        return protocol.TEXT_FORM
    texts = (
        "set input=auto, so that texts are sent"
        if protocol.TEXT_FORM in info.input_forms
        else "give the reward model's tokenizer a chat template, so that texts can be sent"
    )
    raise ConfigError(
        [
            f"the reward server at {place} reads other tokens than the actor writes: {fault}. Serve a reward model of "
            f"the actor's tokenizer, load the actor that belongs to it, or {texts}"
            for fault in faults
        ]
    )
