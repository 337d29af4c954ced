"""The demo: align SmolLM2-135M-Instruct on this machine's CPU against a reward model on a real PyTriton server.

python examples/demo/run_demo.py [--out FOLDER] [HYDRA OVERRIDES of examples/train_reinforce_actor.py]

DEMO_STEPS=N in the environment makes it shorter or longer. `make demo` installs everything and runs this.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("demo")
