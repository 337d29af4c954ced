"""Sample responses from the policy and score them, here or on remote generators."""
