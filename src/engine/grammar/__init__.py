"""From what a client wants the text to be to masks of the tokens that a row may sample.

`grammar_text` writes it in llguidance's language, `trial` tries to compile it in a process of its
own, `compiler` does so for good and remembers it, `compiled` is the result, with `constraints` as
its faster form. `row_grammars` follows one per row, `grammar_steps` moves all of them in one call,
and `masks` keeps what they may sample. docs/structured-output.md has the semantics.
"""
