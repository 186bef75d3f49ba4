"""Of vectors: how texts become them, and that nobody gets another's."""

from tests.mutants.mutation import mutations_of

_ENGINE = ("tests/engine/test_embeddings.py",)
_HTTP = ("tests/http/embeddings/test_embeddings.py",)

MUTATIONS = (
    *mutations_of(
        "src/engine/execution/pooling.py",
        _ENGINE,
        (
            "the sum of the chunks before is left out",
            "            total = total + kept if start else total\n",
            "",
        ),
        (
            "the mean is of the last chunk's tokens",
            "return total / (start + len(hidden))",
            "return total / len(hidden)",
        ),
        (
            "the first token is that of the last chunk",
            "            if start == 0:\n                kept.copy_(own)\n",
            "            kept.copy_(own)\n",
        ),
        (
            "tokens of all rows are those of the first",
            "            begin = end\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/request_state.py",
        _ENGINE,
        (
            "a mean is taken behind a cached prefix",
            'self.prompt_logprobs is None and self.request.pooling in (None, "last")',
            "self.prompt_logprobs is None",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/planning.py",
        _ENGINE,
        (
            "a text of an encoder is cut to what is left of the step",
            "not self.limits.whole_prompts or len(state.token_ids) <= builder.budget",
            "True",
        ),
    ),
    *mutations_of(
        "src/engine/requests/embedder.py",
        _ENGINE,
        (
            "what is cut loses the special token behind it",
            "ids = ids[: max(0, keeps - len(behind))] + behind[-keeps:]",
            "ids = ids[:keeps]",
        ),
        (
            "a vector is cut after it was normalized",
            "values = [value / max(length, 1e-12) for value in values]",
            "values = [value / 2 for value in values]",
        ),
        (
            "a text may be one token too long",
            "        if count > most:\n",
            "        if count > most + 1:\n",
        ),
    ),
    *mutations_of(
        "src/http/embeddings/handlers.py",
        _HTTP,
        (
            "one text more than the limit is taken",
            "if kind is not int and len(given) > most:",
            "if kind is not int and len(given) > most + 1:",
        ),
        (
            "vectors behind the first turn are numbered anew",
            "enumerate(embeddings[start : start + _PER_TURN], start)",
            "enumerate(embeddings[start : start + _PER_TURN])",
        ),
    ),
    *mutations_of(
        "src/models/families/roberta.py",
        ("tests/models/test_encoders.py",),
        (
            "positions begin at the padding token's id",
            'fields.count("pad_token_id") + 1',
            'fields.count("pad_token_id")',
        ),
    ),
    *mutations_of(
        "src/models/sentence_transformers.py",
        ("tests/models/test_sentence_transformers.py",),
        (
            "several poolings are one",
            "len(modes) != 1 or modes[0]",
            "modes[0]",
        ),
        (
            "a module of anybody's is one of sentence-transformers'",
            'package.partition(".")[0] != "sentence_transformers" or name',
            "name",
        ),
    ),
    *mutations_of(
        "src/ops/attention/spec.py",
        ("tests/ops/attention/test_spec.py::test_the_reference_is_the_softmax_written_out",),
        (
            "the last token that is seen is left out",
            "return min(seq_len, position + 1 + (self.ahead or 0))",
            "return min(seq_len, position + (self.ahead or 1))",
        ),
    ),
)
