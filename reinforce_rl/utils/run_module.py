"""Run a module as `python -m` does, but without the current folder on the import path.

Usage: python run_module.py MODULE ARGUMENT...

`python -m` looks in the current folder first, also for json or torch, and a program may be started in a folder that
somebody else made. PYTHONSAFEPATH does the same from Python 3.11 on.
"""

import os
import sys

if __name__ == "__main__":
    # Python puts this file's folder there, unless PYTHONSAFEPATH is set.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
