"""Of prompts: ids that the model does not have."""

from tests.mutants.mutation import rewrites_of

MUTATIONS = rewrites_of(
    "src/engine/requests/prompts.py",
    (
        "tests/cli/test_run_batch.py"
        "::test_a_text_with_a_token_that_the_model_does_not_have_is_refused_alone",
    ),
    (
        "a text may have the first id behind the vocabulary",
        "RequestBuilder._check_ids",
        "max(A, default=0) >= B",
        "max(A, default=0) > B",
    ),
    (
        "a prompt of ids may have the first id behind the vocabulary",
        "RequestBuilder.checked_ids",
        "max(A) <= B",
        "max(A) <= B + 1",
    ),
)
