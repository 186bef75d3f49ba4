"""Programs whose attention mixers rotate, as on CUDA, for devices where segments would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from src.models import Model
from src.models.weights import loader


@contextmanager
def mixers_rotate(rotates: bool = True) -> Iterator[None]:
    """Have whatever loads or outlines a model meanwhile write such a program, or none such."""
    with mock.patch.object(loader, "Model", partial(Model, rotates_in_op=rotates)):
        yield


def rotates_in_mixers(model: Model) -> bool:
    """Whether all mixers of its program do."""
    rotating = {mixer.spec.rotates is not None for mixer in model.program.mixers}
    assert len(rotating) == 1
    return rotating.pop()
