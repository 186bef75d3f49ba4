"""Of the guard in front of all routes, and of keys."""

from tests.mutants.mutation import mutations_of

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
    *mutations_of(
        "src/http/server/guard.py",
        _TESTS,
        (
            "a path that begins like the root loses its beginning",
            'path.startswith(root) and (path == root or path[len(root)] == "/"):',
            "path.startswith(root):",
        ),
        (
            "the root by itself is a path of its own",
            '(path == root or path[len(root)] == "/")',
            'path[len(root) : len(root) + 1] == "/"',
        ),
        (
            "what begins like a probe is open",
            "    if path in self._open_paths:\n",
            "    if path.startswith(tuple(self._open_paths)):\n",
        ),
        (
            "before the keys are read all may pass",
            '        return NotReadyError("the server is starting")\n',
            "        return None\n",
        ),
        (
            "metrics are open to all",
            "(path == METRICS and http.public_metrics)",
            "path == METRICS",
        ),
        (
            "API keys open the debug endpoints",
            "    if keys.admin.admits(bearer(scope)):\n        return None\n    if keys.api",
            "    if keys.api.admits(credentials(scope)):\n        return None\n    if keys.api",
        ),
        (
            "the admin key may come as an API key does",
            "    if keys.admin.admits(bearer(scope)):\n        return None\n    if keys.api",
            "    if keys.admin.admits(credentials(scope)):\n        return None\n    if keys.api",
        ),
        (
            "without an admin key the debug endpoints are open",
            "        if not len(keys.api) or keys.api.admits(credentials(scope)):\n",
            "        if not len(keys.api) or keys.api.admits(credentials(scope)):\n"
            "            return None\n",
        ),
        (
            "the admin key opens every endpoint",
            "if path in ADMIN_READS and keys.admin.admits(bearer(scope)):",
            "if keys.admin.admits(bearer(scope)):",
        ),
        (
            "WebSockets go past the guard",
            'await send({"type": "websocket.close", "code": 1008})',
            "await self._app(scope, receive, send)",
        ),
        (
            "origins are parts of addresses",
            "if ORIGIN.fullmatch(origin) is None:",
            "if ORIGIN.match(origin) is None:",
        ),
        (
            "who may not pass is not challenged",
            "headers = CHALLENGE if unknown else ()",
            "headers = ()",
        ),
    ),
    *mutations_of(
        "src/http/server/guard.py",
        ("tests/http/server/test_body.py", "tests/http/server/test_guard.py"),
        (
            "a body may say its length in two ways",
            'return b"content-length" in names and b"transfer-encoding" in names',
            "return False",
        ),
    ),
    *mutations_of(
        "src/http/server/guard.py",
        _TESTS,
        (
            "nobody learns which key was admitted",
            "            scope[ADMITTED] = admitted\n",
            "",
        ),
    ),
    *mutations_of(
        "src/http/server/keys.py",
        _TESTS,
        (
            "a header that is there twice counts",
            "return given[0] if len(given) == 1 and len(given[0])",
            "return given[0] if given and len(given[0])",
        ),
        (
            "only the last key is one",
            "is_known |= hmac.compare_digest(digest, known)",
            "is_known = hmac.compare_digest(digest, known)",
        ),
    ),
    *mutations_of(
        "src/http/server/keys.py",
        _KEY_TESTS,
        (
            "the last credential is the one that was admitted",
            "            if is_known and admitted is None:\n",
            "            if is_known:\n",
        ),
        (
            "credentials of any length are hashed",
            ' and len(given[0]) <= _MAX_CREDENTIALS else b""',
            ' else b""',
        ),
        (
            "the longest key that may be is none",
            "len(given[0]) <= _MAX_CREDENTIALS",
            "len(given[0]) < _MAX_CREDENTIALS",
        ),
        (
            "an empty file of keys opens the server",
            "    if not keys:\n        # Otherwise",
            "    if False:\n        # Otherwise",
        ),
        (
            "any scheme is a bearer's",
            "    if value[: len(_SCHEME)].lower() != _SCHEME:\n        return []\n",
            "",
        ),
        (
            "a key's hash is a key",
            "    if hashed is not None:\n        return bytes.fromhex(hashed[1])\n",
            "    if hashed is not None:\n        return _hash(key.encode())\n",
        ),
        (
            "the admin key may be an API key",
            "    if keys.api.shares(keys.admin):\n",
            "    if False:\n",
        ),
        (
            "comments of a file are keys",
            'if line and not line.startswith("#")]',
            "if line]",
        ),
        (
            "as many keys as there may be are refused",
            "    if len(names) > MAX_KEYS:\n",
            "    if len(names) >= MAX_KEYS:\n",
        ),
    ),
    *mutations_of(
        "src/http/server/keys.py",
        ("tests/http/admin/test_debug.py::test_the_key_comes_from_a_setting_or_a_file",),
        (
            "an admin key of white space is one",
            "    if not key.strip():\n",
            "    if not key:\n",
        ),
    ),
    *mutations_of(
        "src/http/server/guard.py",
        (f"{_TESTS[0]}::test_what_changes_the_server_needs_the_admin_key_where_there_is_any_key",),
        (
            "without an admin key an API key may load adapters",
            "if path in self._admin_paths and (len(keys.api) or len(keys.admin)):",
            "if path in self._admin_paths and len(keys.admin):",
        ),
        (
            "without API keys anybody may load adapters, whatever the admin key",
            "if path in self._admin_paths and (len(keys.api) or len(keys.admin)):",
            "if path in self._admin_paths and len(keys.api):",
        ),
    ),
    *mutations_of(
        "src/http/responses/store.py",
        ("tests/http/responses/test_store.py",),
        (
            "items of forgotten responses stay in the index",
            "            self._items.pop(item.id, None)\n",
            "            pass\n",
        ),
        (
            "one item of a response stays in the index",
            "        for item in entry.body.output:\n            self._items.pop",
            "        for item in entry.body.output[1:]:\n            self._items.pop",
        ),
    ),
)
