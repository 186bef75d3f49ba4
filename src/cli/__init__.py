"""The command line: ``python -m src serve | generate | chat``, one module each."""
