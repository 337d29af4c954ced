"""The algorithm: pure functions of tensors, without process groups, config or models."""
