"""Models outside of training: `eval` and `chat`, on the path of the trainer's validation."""
