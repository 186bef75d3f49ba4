"""The command line: ``python -m src serve | generate | chat | bench ...``, one module each."""
