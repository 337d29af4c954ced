"""Whether a reward server is up, what it serves, how fast it is, and what is wrong.

python examples/check_reward_server.py http://HOST:PORT --token-file TOKEN_FILE

The token is that of the file, or of the environment variable REINFORCE_REWARD_TOKEN. Exit code 0 where the server can
be used, else 1.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("check-server")
