"""The algorithm: pure functions of tensors that know no process group, no config and no model, and the trainer."""
