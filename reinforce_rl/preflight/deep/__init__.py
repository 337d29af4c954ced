"""`preflight=deep`: the user's own run on fake GPUs, at full width, and what it costs on a named machine."""
