"""Whether a reward server is up, what it serves, how fast it is, and what is wrong.

python examples/check_reward_server.py http://HOST:PORT --token-file TOKEN_FILE

The token is that of the file, or of the environment variable REINFORCE_REWARD_TOKEN. Exit code 0 where the server can
be used, else 1.
"""

from __future__ import annotations

import argparse
import sys

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.doctor import check_server
from reinforce_rl.rewards.wire import read_token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="http://HOST:PORT")
    parser.add_argument("--token-file", help="file with the access token, mode 0600")
    args = parser.parse_args()
    try:
        check_server(args.url, read_token(args.token_file, "--token-file"), lambda line: print(line, flush=True))
    except ReinforceError as error:
        print(f"NOT OK: {error}")
        return 1
    print("OK: it can be used")
    return 0


if __name__ == "__main__":
    sys.exit(main())
