"""`python -m reinforce_rl` is the command `reinforce-rl`."""

from reinforce_rl.launch.main import main

if __name__ == "__main__":
    main()
