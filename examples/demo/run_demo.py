"""Run the demo: align SmolLM2-135M-Instruct on this machine's CPU against a real reward server.

python examples/demo/run_demo.py [--out FOLDER] [OVERRIDES of examples/train_reinforce_actor.py]

The reward model runs on PyTriton. DEMO_STEPS=N in the environment sets the number of steps.
`make demo` installs everything and runs this.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("demo")
