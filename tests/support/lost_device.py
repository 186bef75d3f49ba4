"""What becomes of a process of tests whose CUDA device is lost."""

from __future__ import annotations

import os

import pytest
import torch

EXIT_CODE = 70


def end_if_lost(test: str) -> None:
    """End this process if the device answers with an error behind `test`.

    An illegal address or an assertion of a kernel stays with the process: every later call of CUDA
    fails, whoever makes it. A worker of xdist dies, so that another one takes its place and the
    report names one crash. Without workers the run ends here, with its report.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        # torch raises several kinds, and none of them leaves a device to go on with.
        message = f"the device is lost behind {test}: {error}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(message, returncode=EXIT_CODE)
        os.write(2, f"{message}\n".encode())
        os._exit(EXIT_CODE)
