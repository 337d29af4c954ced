"""Generation: the protocol that the trainer knows, sampling rules, and the engines behind it."""
