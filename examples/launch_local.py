"""Start the reward server and the actor on this machine, and stop both together.

python examples/launch_local.py --run-dir runs/one --server-args reward_model.restore_from_path=TRUNK \
    reward_model.head_path=HEAD.safetensors --actor-args pretrained_checkpoint.restore_from_path=POLICY \
    model.data.data_prefix.train=PROMPTS.jsonl exp_manager.explicit_log_dir=runs/one

What follows --server-args and --actor-args are Hydra overrides of examples/serve_reward_model.py and
examples/train_reinforce_actor.py. A free port is chosen and passed to both, unless the server gets inference.port=N.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import load_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.local import launch, make_plan, split_arguments

EXAMPLES = Path(__file__).resolve().parent
ACTOR = EXAMPLES / "train_reinforce_actor.py"


def main() -> int:
    own, server_args, actor_args = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [--server-args OVERRIDE ...] [--actor-args OVERRIDE ...]",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("."), help="the server's log goes to RUN_DIR/logs")
    parser.add_argument("--server-script", type=Path, default=EXAMPLES / "serve_reward_model.py")
    parser.add_argument("--actor-script", type=Path, default=ACTOR)
    parser.add_argument("--ready-seconds", type=float, default=600.0, help="for the server to become ready")
    parser.add_argument("--grace-seconds", type=float, default=30.0, help="between SIGTERM and SIGKILL")
    args = parser.parse_args(own)
    try:
        if args.actor_script == ACTOR and not any(arg.startswith("-") for arg in actor_args):
            load_config(compose(ACTOR.stem, actor_args))  # before minutes of loading the server
        plan = make_plan(
            *(args.server_script, args.actor_script, args.run_dir, server_args, actor_args),
            ready_seconds=args.ready_seconds,
            grace_seconds=args.grace_seconds,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return launch(plan, say=lambda text: print(f"[launch] {text}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
