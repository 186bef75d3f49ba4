"""From a client's constraint on the text to masks of the tokens that a row may sample.

`grammar_text` translates a constraint to llguidance's language. `trial` tries to compile it in a
separate process. `compiler` then compiles it here and caches it. `compiled` is the result, with
`constraints` as a faster form. `row_grammars` follows one grammar per row, `grammar_steps` advances
all of them in one call, and `masks` keeps their masks. docs/structured-output.md has the semantics.
"""
