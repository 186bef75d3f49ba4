"""How much memory an engine takes, and how fast it can be: of one that starts, or in advance.

`start` sizes memory for a device that is here, or for one that is only described. `outline` plans a
checkpoint from its configuration alone.
"""
