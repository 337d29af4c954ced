"""Rewards: the protocol that the trainer knows, the PyTriton server and its client, the reward model."""
