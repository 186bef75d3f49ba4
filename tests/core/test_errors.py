import inspect

from src.core import errors


def test_the_tree_in_the_docstring_shows_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SlipstreamError):
            assert name in drawn


def test_a_request_error_carries_what_a_client_is_told() -> None:
    error = errors.PromptTooLongError("too long", param="prompt")
    assert (str(error), error.message, error.param) == ("too long", "too long", "prompt")
    assert error.code == "context_length_exceeded"
    assert errors.QueueFullError("full", retry_after=2.5).retry_after == 2.5
