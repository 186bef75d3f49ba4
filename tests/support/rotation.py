"""Programs in which attention mixers apply RoPE, as on CUDA, on devices where segments would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from src.models import Model
from src.models.loading import loader


@contextmanager
def mixers_rotate(rotates: bool = True) -> Iterator[None]:
    """Make models that are loaded or outlined in this block use such programs, or not."""
    rotating = partial(loader.ModelOptions, rotates_in_op=rotates)
    with mock.patch.object(loader, "ModelOptions", rotating):
        yield


def rotates_in_mixers(model: Model) -> bool:
    """Whether all mixers of the model's program apply RoPE."""
    rotating = {getattr(mixer.spec, "rotates", None) is not None for mixer in model.program.mixers}
    assert len(rotating) == 1
    return rotating.pop()
