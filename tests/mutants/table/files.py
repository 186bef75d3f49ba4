"""Of GGUF files, of the words of quantized checkpoints, of indices, and of saved embeddings."""

from tests.mutants.mutation import rewrites_of

_TOKENS = ("tests/text/test_gguf_hostile_tokens.py",)
_CHOICE = ("tests/models/test_gguf_choice.py",)
_WORDS = ("tests/models/test_quantization_words.py",)
_EMBEDDING = ("tests/models/adapters/test_saved_embedding.py",)

MUTATIONS = (
    *rewrites_of(
        "src/core/gguf_tokens.py",
        _TOKENS,
        (
            "a known end of a turn stays what the file's list says",
            "GGUFTokens._kinds",
            "{self.ids[A] for A in _TURN_ENDS if A in self.ids}",
            "set[int]()",
        ),
        (
            "what the metadata names as an end stays text",
            "GGUFTokens._kinds",
            "_ENDS",
            "()",
        ),
        (
            "a sign that pads is a control token",
            "GGUFTokens._kinds",
            "_is_tag(self.tokens[A])",
            "True",
        ),
        (
            "a token may be as long as a file",
            "GGUFTokens.__init__",
            "A > _MOST_TOKEN_CHARACTERS",
            "False",
        ),
    ),
    *rewrites_of(
        "src/text/gguf_tokenizer.py",
        _TOKENS,
        (
            "the characters of merges are not counted",
            "_implied_merges",
            "len(A) * len(B)",
            "0",
        ),
        (
            "a piece of any length is cut",
            "_implied_merges",
            "len(A) > _MOST_PIECE_CHARACTERS or B > _MOST_CUTS",
            "B > _MOST_CUTS",
        ),
        (
            "tags of Phi-3 leave the white space behind them",
            "_Vocabulary.added",
            "A and B not in _KEEPS_SPACE",
            "False",
        ),
        (
            "the beginning of a text takes the white space behind it",
            "_Vocabulary.added",
            "A and B not in _KEEPS_SPACE",
            "A",
        ),
    ),
    *rewrites_of(
        "src/models/gguf/checkpoint.py",
        ("tests/models/gguf/test_hostile.py",),
        (
            "experts of all stacks are not added up",
            "_named",
            "A += max(B, 1)",
            "A = max(B, 1)",
        ),
    ),
    *rewrites_of(
        "src/models/gguf/files.py",
        _CHOICE,
        (
            "a precision is any part of a name",
            "is_named",
            "f'(?<![a-z0-9_]){re.escape(A.lower())}(?![a-z0-9_])'",
            "f'{re.escape(A.lower())}'",
        ),
        (
            "a projector counts as a model",
            "find_gguf",
            "[A for A in B if C[A] is None]",
            "list(B)",
        ),
    ),
    *rewrites_of(
        "src/models/loading/loader.py",
        ("tests/models/gguf/test_odd_metadata.py", "tests/models/test_narrow_dtype.py"),
        (
            "sizes are not held against the tensors before memory is taken",
            "load_model",
            "Model(A, B.write, C, check if not D else lambda E: None)",
            "Model(A, B.write, C)",
        ),
        (
            "float16 is kept where its range is left",
            "resolve_dtype",
            "family_of(A.architecture).overflows_float16",
            "False",
        ),
    ),
    *rewrites_of(
        "src/models/checkpoint.py",
        ("tests/models/test_loader.py",),
        (
            "copies in two shards are not compared",
            "_open_shards",
            "A is not B and (not equal_contents(A, B))",
            "False",
        ),
        (
            "no tensor may be in two shards",
            "_open_shards",
            "A is not B and (not equal_contents(A, B))",
            "A is not B",
        ),
    ),
    *rewrites_of(
        "src/models/weights/schemes/of_methods.py",
        _WORDS,
        (
            "the last rule of GPTQ counts",
            "Rules.of",
            "self.rules",
            "reversed(self.rules)",
        ),
        (
            "a rule of GPTQ changes nothing",
            "_rules",
            "A |= {B: C.raw(B) for B in _OF_LAYOUT if C.raw(B) is not None}",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/models/weights/schemes/compressed_tensors.py",
        _WORDS,
        (
            "rounded inputs of plain weights are passed over",
            "Groups.of",
            "A is None or not A.rounds",
            "True",
        ),
    ),
    *rewrites_of(
        "src/models/adapters/reader.py",
        _EMBEDDING,
        (
            "an embedding that was trained is passed over",
            "_pass_over",
            "not _equal(A, B)",
            "False",
        ),
        (
            "a quantized embedding is taken for one of another vocabulary",
            "_pass_over",
            "_is_packed(A) and B.shape[:1] == A.shape[:1]",
            "False",
        ),
        (
            "an embedding that is wider than the quantized one makes the file too large",
            "_most_values",
            "8 * A.size if _is_packed(A) else math.prod(A.shape)",
            "math.prod(A.shape)",
        ),
    ),
    *rewrites_of(
        "src/text/expressions.py",
        ("tests/text/test_expressions.py",),
        (
            "only exponential expressions are found",
            "_LENGTHS",
            "192",
            "48",
        ),
        (
            "normalizers are not tried",
            "require_short_matches",
            "(A.normalizer, A.pre_tokenizer)",
            "(A.pre_tokenizer,)",
        ),
    ),
    *rewrites_of(
        "src/text/tokenizer.py",
        ("tests/text/test_chosen_template.py", "tests/text/test_expressions.py"),
        (
            "the setting of a template is passed over",
            "Tokenizer.from_directory",
            "A is not None",
            "False",
        ),
        (
            "a tokenizer that gives up is the server's fault",
            "Tokenizer._encoded",
            "if not is_panic(error):\n    raise",
            "raise",
        ),
    ),
    *rewrites_of(
        "src/models/hub.py",
        _CHOICE,
        (
            "what only resembles the wanted model is fetched too",
            "_gguf_of",
            "_models_of(B, C) if A else []",
            "[]",
        ),
        (
            "of a split model the first file is fetched alone",
            "_gguf_of",
            "files_of(A)",
            "[A]",
        ),
        (
            "a configuration hides the GGUF file beside it",
            "resolve_model",
            "(A / 'config.json').exists() and any(A.glob('*.safetensors'))",
            "(A / 'config.json').exists()",
        ),
    ),
)
