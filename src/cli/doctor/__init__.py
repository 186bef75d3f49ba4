"""``python -m src doctor``: checks an installation with the code that a server uses."""
