"""Kernels of drafts in Triton's interpreter, which the program that imports this has turned on."""

import torch

from src.ops import ACCEPT_DRAFTS, LOOK_UP
from src.ops.drafts import accept_drafts_triton as accept_drafts
from src.ops.drafts import look_up_triton as look_up
from tests.ops.drafts.comparison import accepted_alike


def drafts_match() -> None:
    """Whatever is looked at together: a row's places may lie in one block, or in many."""
    whole = look_up.BLOCK
    for number, case in enumerate(LOOK_UP.cases):
        look_up.BLOCK = (64, 256, whole)[number % 3]
        args = LOOK_UP.build("cpu", **case)
        expected, got = LOOK_UP.reference(*args), look_up.run(*args)
        assert torch.equal(expected, got), (case, expected, got)
    look_up.BLOCK = whole
    for case in ACCEPT_DRAFTS.cases:
        accepted_alike(ACCEPT_DRAFTS, accept_drafts.run, ACCEPT_DRAFTS.build("cpu", **case))
