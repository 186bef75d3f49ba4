"""``python -m src bench ...``: one module per subcommand, listed in ``commands``."""
