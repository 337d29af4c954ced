"""`preflight=deep`: run the user's job on fake GPUs at full width and predict its cost on a named machine."""
