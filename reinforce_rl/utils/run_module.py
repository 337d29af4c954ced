"""Run a module as `python -m` does, but without the current folder on the import path.

Usage: python run_module.py MODULE ARGUMENT...

`python -m` looks in the current folder first, also for json or torch, and somebody else may have
made the folder in which a program is started. PYTHONSAFEPATH does the same from Python 3.11 on.
"""

import os
import sys

if __name__ == "__main__":
    # Python inserts this file's folder, unless PYTHONSAFEPATH is set.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
