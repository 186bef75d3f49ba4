"""Of the guard in front of all routes, and of keys."""

from tests.mutants.mutation import rewrites_of

_TESTS = ("tests/http/server/test_guard.py",)
# The last two need an engine.
_KEY_TESTS = (
    f"{_TESTS[0]}::test_the_longest_key_is_one_and_nothing_longer_is_looked_at",
    f"{_TESTS[0]}::test_as_many_keys_as_there_may_be_are_kept",
    f"{_TESTS[0]}::test_keys_come_from_settings_and_a_file",
    f"{_TESTS[0]}::test_settings_that_are_refused",
    f"{_TESTS[0]}::test_how_a_key_is_sent",
    f"{_TESTS[0]}::test_stored_responses_are_of_the_key_that_was_admitted",
)

MUTATIONS = (
    *rewrites_of(
        "src/http/server/guard.py",
        _TESTS,
        (
            "a path that begins like the root loses its beginning",
            "route_path",
            "A and B.startswith(A) and (B == A or B[len(A)] == '/')",
            "A and B.startswith(A)",
        ),
        (
            "the root by itself is a path of its own",
            "route_path",
            "A == B or A[len(B)] == '/'",
            "A[len(B):len(B) + 1] == '/'",
        ),
        (
            "what begins like a probe is open",
            "Guard._refusal",
            "A in self._open_paths",
            "A.startswith(tuple(self._open_paths))",
        ),
        (
            "before the keys are read all may pass",
            "Guard._refusal",
            "NotReadyError('the server is starting')",
            "None",
        ),
        (
            "metrics are open to all",
            "Guard._refusal",
            "A == METRICS and B.public_metrics",
            "A == METRICS",
        ),
        (
            "API keys open the debug endpoints",
            "_admin_refusal",
            "A.admin.admits(bearer(B))",
            "A.api.admits(credentials(B))",
        ),
        (
            "the admin key may come as an API key does",
            "_admin_refusal",
            "bearer",
            "credentials",
        ),
        (
            "without an admin key the debug endpoints are open",
            "_debug_refusal",
            "return RouteNotFoundError(f\"there is nothing at {A['path'][:200]}\")",
            "return None\nreturn RouteNotFoundError(f\"there is nothing at {A['path'][:200]}\")",
        ),
        (
            "the admin key opens every endpoint",
            "Guard._refusal",
            "A in ADMIN_READS and B.admin.admits(bearer(C))",
            "B.admin.admits(bearer(C))",
        ),
        (
            "WebSockets go past the guard",
            "Guard.__call__",
            "A({'type': 'websocket.close', 'code': 1008})",
            "self._app(scope, receive, A)",
        ),
        (
            "origins are parts of addresses",
            "check_access",
            "ORIGIN.fullmatch",
            "ORIGIN.match",
        ),
        (
            "who may not pass is not challenged",
            "Guard._guarded",
            "CHALLENGE if A else ()",
            "()",
        ),
    ),
    *rewrites_of(
        "src/http/server/guard.py",
        ("tests/http/server/test_body.py", "tests/http/server/test_guard.py"),
        (
            "a body may say its length in two ways",
            "_has_two_lengths",
            "b'content-length' in A and b'transfer-encoding' in A",
            "False",
        ),
    ),
    *rewrites_of(
        "src/http/server/guard.py",
        _TESTS,
        (
            "nobody learns which key was admitted",
            "Guard._refusal",
            "A[ADMITTED] = B",
            "",
        ),
    ),
    *rewrites_of(
        "src/http/server/keys.py",
        _TESTS,
        (
            "a header that is there twice counts",
            "_only",
            "len(A) == 1",
            "A",
        ),
        (
            "only the last key is one",
            "KeyRing.admitted",
            "A |= hmac.compare_digest(B, C)",
            "A = hmac.compare_digest(B, C)",
        ),
    ),
    *rewrites_of(
        "src/http/server/keys.py",
        _KEY_TESTS,
        (
            "the last credential is the one that was admitted",
            "KeyRing.admitted",
            "A and B is None",
            "A",
        ),
        (
            "credentials of any length are hashed",
            "_only",
            "len(A) == 1 and len(A[0]) <= _MAX_CREDENTIALS",
            "len(A) == 1",
        ),
        (
            "the longest key that may be is none",
            "_only",
            "len(A[0]) <= _MAX_CREDENTIALS",
            "len(A[0]) < _MAX_CREDENTIALS",
        ),
        (
            "an empty file of keys opens the server",
            "_lines",
            "if not A:\n    B",
            "if False:\n    B",
        ),
        (
            "any scheme is a bearer's",
            "bearer",
            "if A[:len(_SCHEME)].lower() != _SCHEME:\n    return []",
            "",
        ),
        (
            "a key's hash is a key",
            "_configured",
            "bytes.fromhex(A[1])",
            "_hash(key.encode())",
        ),
        (
            "the admin key may be an API key",
            "load_keys",
            "A.api.shares(A.admin)",
            "False",
        ),
        (
            "comments of a file are keys",
            "_lines",
            "A and (not A.startswith('#'))",
            "A",
        ),
        (
            "as many keys as there may be are refused",
            "load_keys",
            "len(A) > MAX_KEYS",
            "len(A) >= MAX_KEYS",
        ),
    ),
    *rewrites_of(
        "src/http/server/keys.py",
        ("tests/http/admin/test_debug.py::test_the_key_comes_from_a_setting_or_a_file",),
        (
            "an admin key of white space is one",
            "admin_key",
            "not A.strip()",
            "not A",
        ),
    ),
    *rewrites_of(
        "src/http/server/guard.py",
        (f"{_TESTS[0]}::test_what_changes_the_server_needs_the_admin_key_where_there_is_any_key",),
        (
            "without an admin key an API key may load adapters",
            "Guard._refusal",
            "len(A.api) or len(A.admin)",
            "len(A.admin)",
        ),
        (
            "without API keys anybody may load adapters, whatever the admin key",
            "Guard._refusal",
            "len(A.api) or len(A.admin)",
            "len(A.api)",
        ),
    ),
    *rewrites_of(
        "src/http/responses/store.py",
        ("tests/http/responses/test_store.py",),
        (
            "items of forgotten responses stay in the index",
            "ResponseStore._drop",
            "self._items.pop(A.id, None)",
            "pass",
        ),
        (
            "one item of a response stays in the index",
            "ResponseStore._drop",
            "A.body.output",
            "A.body.output[1:]",
        ),
    ),
)
