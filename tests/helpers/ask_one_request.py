"""Score one request in a separate process: `python ask_one_request.py PORT`.

It sends the request once, so that the connection's first queries are answered, prints "ready", and
sends it again for each line on its input.
"""

import sys

from helpers.rewards import request_of

from reinforce_rl.rewards.client import RemoteGPTRMClient

SEQUENCES = [[5, 6, 7], [8, 9, 10, 11]]


def main() -> None:
    client = RemoteGPTRMClient(port=int(sys.argv[1]), deadline_seconds=60.0)
    client.infer_rm(request_of(SEQUENCES)).result()
    print("ready", flush=True)
    for _ in sys.stdin:
        answer = client.infer_rm(request_of(SEQUENCES)).result()
        print(*answer.values.tolist(), flush=True)
    client.close()


if __name__ == "__main__":
    main()
