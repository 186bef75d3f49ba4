"""Of GGUF files, of the words of quantized checkpoints, of indices, and of saved embeddings."""

from tests.mutants.mutation import mutations_of

_TOKENS = ("tests/text/test_gguf_hostile_tokens.py",)
_CHOICE = ("tests/models/test_gguf_choice.py",)
_WORDS = ("tests/models/test_quantization_words.py",)
_EMBEDDING = ("tests/models/adapters/test_saved_embedding.py",)

MUTATIONS = (
    *mutations_of(
        "src/core/gguf_tokens.py",
        _TOKENS,
        (
            "a known end of a turn stays what the file's list says",
            "control = {self.ids[token] for token in _TURN_ENDS if token in self.ids}",
            "control = set[int]()",
        ),
        (
            "what the metadata names as an end stays text",
            "for name in _ENDS if (index := self.id_of(name)) is not None}",
            "for name in () if (index := self.id_of(name)) is not None}",
        ),
        (
            "a sign that pads is a control token",
            "            if _is_tag(self.tokens[index]):",
            "            if True:",
        ),
        (
            "a token may be as long as a file",
            "if longest > _MOST_TOKEN_CHARACTERS:",
            "if False:",
        ),
    ),
    *mutations_of(
        "src/text/gguf_tokenizer.py",
        _TOKENS,
        (
            "the characters of merges are not counted",
            "characters += len(token) * len(found)",
            "characters += 0",
        ),
        (
            "a piece of any length is cut",
            "if len(token) > _MOST_PIECE_CHARACTERS or cuts > _MOST_CUTS:",
            "if cuts > _MOST_CUTS:",
        ),
        (
            "tags of Phi-3 leave the white space behind them",
            "rstrip=strips and token not in _KEEPS_SPACE,",
            "rstrip=False,",
        ),
        (
            "the beginning of a text takes the white space behind it",
            "rstrip=strips and token not in _KEEPS_SPACE,",
            "rstrip=strips,",
        ),
    ),
    *mutations_of(
        "src/models/gguf/checkpoint.py",
        ("tests/models/gguf/test_hostile.py",),
        (
            "experts of all stacks are not added up",
            "total += max(count, 1)",
            "total = max(count, 1)",
        ),
    ),
    *mutations_of(
        "src/models/gguf/files.py",
        _CHOICE,
        (
            "a precision is any part of a name",
            "(?<![a-z0-9_]){re.escape(wanted.lower())}(?![a-z0-9_])",
            "{re.escape(wanted.lower())}",
        ),
        (
            "a projector counts as a model",
            "models = [file for file in firsts if kinds[file] is None]",
            "models = list(firsts)",
        ),
    ),
    *mutations_of(
        "src/models/loading/loader.py",
        ("tests/models/gguf/test_odd_metadata.py", "tests/models/test_narrow_dtype.py"),
        (
            "sizes are not held against the tensors before memory is taken",
            "given, check if not is_dummy else lambda model: None)",
            "given)",
        ),
        (
            "float16 is kept where its range is left",
            "and family_of(config.architecture).overflows_float16:\n",
            "and False:\n",
        ),
    ),
    *mutations_of(
        "src/models/checkpoint.py",
        ("tests/models/test_loader.py",),
        (
            "copies in two shards are not compared",
            "if known is not stored and not equal_contents(known, stored):",
            "if False:",
        ),
        (
            "no tensor may be in two shards",
            "if known is not stored and not equal_contents(known, stored):",
            "if known is not stored:",
        ),
    ),
    *mutations_of(
        "src/models/weights/schemes/of_methods.py",
        _WORDS,
        (
            "the last rule of GPTQ counts",
            "for rule, scheme in self.rules if rule.match(module)), own)",
            "for rule, scheme in reversed(self.rules) if rule.match(module)), own)",
        ),
        (
            "a rule of GPTQ changes nothing",
            "kept |= {name: own.raw(name) for name in _OF_LAYOUT if own.raw(name) is not None}",
            "pass",
        ),
    ),
    *mutations_of(
        "src/models/weights/schemes/compressed_tensors.py",
        _WORDS,
        (
            "rounded inputs of plain weights are passed over",
            "if found is None or not found.rounds:",
            "if True:",
        ),
    ),
    *mutations_of(
        "src/models/adapters/reader.py",
        _EMBEDDING,
        (
            "an embedding that was trained is passed over",
            "        if not _equal(saved, own):\n",
            "        if False:\n",
        ),
        (
            "a quantized embedding is taken for one of another vocabulary",
            "        if _is_packed(own) and saved.shape[:1] == own.shape[:1]:\n",
            "        if False:\n",
        ),
        (
            "an embedding that is wider than the quantized one makes the file too large",
            "    return 8 * own.size if _is_packed(own) else math.prod(own.shape)\n",
            "    return math.prod(own.shape)\n",
        ),
    ),
    *mutations_of(
        "src/text/expressions.py",
        ("tests/text/test_expressions.py",),
        (
            "only exponential expressions are found",
            "_LENGTHS: Final = (48, 192)",
            "_LENGTHS: Final = (48, 48)",
        ),
        (
            "normalizers are not tried",
            "(backend.normalizer, backend.pre_tokenizer))):",
            "(backend.pre_tokenizer,))):",
        ),
    ),
    *mutations_of(
        "src/text/tokenizer.py",
        ("tests/text/test_chosen_template.py", "tests/text/test_expressions.py"),
        (
            "the setting of a template is passed over",
            "        if chat_template is not None:\n",
            "        if False:\n",
        ),
        (
            "a tokenizer that gives up is the server's fault",
            "            if not is_panic(error):\n                raise\n",
            "            raise\n",
        ),
    ),
    *mutations_of(
        "src/models/hub.py",
        _CHOICE,
        (
            "what only resembles the wanted model is fetched too",
            "    if models := _models_of(repository, revision) if fetches else []:\n",
            "    if models := []:\n",
        ),
        (
            "of a split model the first file is fetched alone",
            "for file in files_of(one))",
            "for file in [one])",
        ),
        (
            "a configuration hides the GGUF file beside it",
            ' and any(local.glob("*.safetensors"))',
            "",
        ),
    ),
)
