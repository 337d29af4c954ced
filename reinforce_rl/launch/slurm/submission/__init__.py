"""`slurm/submit.py`: plan, check and submit a job of reward servers and actor. Needs the Python environment."""
