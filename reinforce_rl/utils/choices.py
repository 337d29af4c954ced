"""Constants for reward settings, shared by config checks and the code that runs."""

TOKENS_FORM = "tokens"
TEXT_FORM = "text"
AUTO_FORM = "auto"
INPUT_FORMS = (AUTO_FORM, TOKENS_FORM, TEXT_FORM)

PROVIDED = "reinforce_rl.rewards.functions"
PROVIDED_NAMES = ("gsm8k", "matches", "length", "vader")
