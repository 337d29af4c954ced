"""The actor: the policy being trained, and the frozen reference it is held against."""
