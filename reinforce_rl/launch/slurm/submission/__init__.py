"""`slurm/submit.py`: plan a job of reward servers and actor, check it, and hand it to Slurm. Needs the environment."""
