"""Models outside of training: `eval`, `chat` and the trainer's validation generate and score on one path."""
