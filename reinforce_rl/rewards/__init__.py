"""Reward sources: the client of the reward server, reward functions, and their weighted sum."""
