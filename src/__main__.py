"""``python -m src``: the command line."""

import os
import sys
import threading

from src.cli.main import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name == "slipstream-compile" for thread in threading.enumerate()):
        # Compilation in the background cannot be cancelled, and an orderly exit in the middle of it
        # ends in a crash of the C++ runtime.
        os._exit(code)
    sys.exit(code)
