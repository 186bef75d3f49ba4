"""A load that hurts: everything that clients do to a server, until something gives.

``exchange`` speaks HTTP byte by byte, ``questions`` have known answers, ``traffic`` is what clients
do; ``vitals`` is what a server is made of when it is idle, ``probe`` tells of it from inside,
``server`` is the process under load; ``soak`` puts them together. docs/soak.md describes it.
"""
