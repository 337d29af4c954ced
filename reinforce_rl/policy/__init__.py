"""The actor: the policy in training and its frozen reference."""
