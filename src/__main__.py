"""``python -m src``: the command line."""

import sys
import threading

from src.cli.main import main
from src.core.process_end import end_now

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name == "slipstream-compile" for thread in threading.enumerate()):
        # Compilation in the background cannot be cancelled, and an orderly exit in the middle of it
        # ends in a crash of the C++ runtime.
        end_now(code)
    sys.exit(code)
