"""Of prompts: ids that the model does not have."""

from tests.mutants.mutation import mutations_of

MUTATIONS = mutations_of(
    "src/engine/requests/prompts.py",
    (
        "tests/cli/test_run_batch.py"
        "::test_a_text_with_a_token_that_the_model_does_not_have_is_refused_alone",
    ),
    (
        "a text may have the first id behind the vocabulary",
        "        if max(ids, default=0) >= size:\n",
        "        if max(ids, default=0) > size:\n",
    ),
    (
        "a prompt of ids may have the first id behind the vocabulary",
        "min(prompt) >= 0 and max(prompt) <= most:",
        "min(prompt) >= 0 and max(prompt) <= most + 1:",
    ),
)
