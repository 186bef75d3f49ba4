"""A stress test: everything that clients may do to a server, for a long time.

``exchange`` speaks HTTP byte by byte, ``questions`` have known answers, and ``traffic`` defines the
clients' behaviour. ``vitals`` are readings of an idle server, ``probe`` reads them inside of the
process, ``server`` runs it, and ``soak`` combines these. docs/soak.md describes it.
"""
