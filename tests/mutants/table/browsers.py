"""Of who asks in a browser's name, of long bodies, of lines of the log, and of event loops."""

from tests.mutants.mutation import mutations_of

_PAGES = "tests/http/server/test_browsers.py"
# Those that need no engine come first.
_WHO = (
    f"{_PAGES}::test_who_asks",
    f"{_PAGES}::test_the_scheme_is_the_server_s",
    f"{_PAGES}::test_under_which_name",
    f"{_PAGES}::test_a_program_may_say_no_name_and_none_says_two",
    f"{_PAGES}::test_what_is_no_name_is_refused_at_start",
)
_BODIES = "tests/http/server/test_long_bodies.py"
_LOGS = ("tests/observability/test_logs.py",)

MUTATIONS = (
    *mutations_of(
        "src/http/server/browsers.py",
        _WHO,
        (
            "pages may delete",
            '_SAFE_METHODS: Final = frozenset({"GET", ',
            '_SAFE_METHODS: Final = frozenset({"DELETE", "GET", ',
        ),
        (
            "of two origins the first one counts",
            "if len(given) > 1 or b",
            "if b",
        ),
        (
            "pages without an origin are the server's own, if the browser says so",
            'if len(given) > 1 or b"null" in given:',
            "if len(given) > 1:",
        ),
        (
            "pages of the same site are the server's own",
            'if sites and sites != [b"none"]:',
            'if sites and sites not in ([b"none"], [b"same-site"]):',
        ),
        (
            "a browser that names no site is believed whatever the origin is",
            "    return bool(given) and not _is_own_origin(scope, given[0])\n",
            "    return bool(given) and not sites and not _is_own_origin(scope, given[0])\n",
        ),
        (
            "an origin is its host, whatever the scheme is",
            'if scheme != scope.get("scheme", "http") or len(hosts) != 1:',
            "if len(hosts) != 1:",
        ),
        (
            "of two hosts the first one counts for an origin",
            'scope.get("scheme", "http") or len(hosts) != 1:',
            'scope.get("scheme", "http") or not hosts:',
        ),
        (
            "an origin begins like the host",
            "return place.removesuffix(default) == host.removesuffix(default)",
            "return place.removesuffix(default).startswith(host.removesuffix(default))",
        ),
        (
            "a port that is the scheme's has to be written, or left out, on both sides",
            "return place.removesuffix(default) == host.removesuffix(default)",
            "return place == host",
        ),
        (
            "of two hosts one that is known is enough",
            'return "*" in allowed or all(',
            'return "*" in allowed or any(',
        ),
        (
            "a host begins like one that is known",
            "found = _HOST.fullmatch(host.lower())",
            "found = _HOST.match(host.lower())",
        ),
        (
            "names that end like one are below it",
            'return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern',
            'return name.endswith(pattern[2:]) if pattern.startswith("*.") else name == pattern',
        ),
        (
            "addresses need an entry",
            "    if not name or is_address(name):\n",
            "    if not name:\n",
        ),
        (
            "names have to be written in small letters in the settings",
            "    pattern = pattern.lower()\n",
            "",
        ),
    ),
    *mutations_of(
        "src/http/server/guard.py",
        (_PAGES,),
        (
            "pages of other origins may use all there is",
            "    if is_foreign_page(scope, http.cors_origins):\n",
            "    if False:\n",
        ),
        (
            "any name is answered where there are no keys",
            "if not len(keys.api) and not is_known_host(scope, http.allowed_hosts):",
            "if False:",
        ),
        (
            "names are looked at where there are keys",
            "if not len(keys.api) and not is_known_host(",
            "if not is_known_host(",
        ),
        (
            "an admin key is taken for a lock of the API",
            "if not len(keys.api) and not is_known_host(",
            "if not len(keys.api) and not len(keys.admin) and not is_known_host(",
        ),
        (
            "names in the settings are not looked at",
            "if ALLOWED_HOST.fullmatch(host) is None:",
            "if ALLOWED_HOST.match(host) is None:",
        ),
    ),
    *mutations_of(
        "src/http/server/body.py",
        (_PAGES, f"{_BODIES}::test_a_long_body_has_a_bounded_number_of_fields"),
        (
            "a page's body without a type is JSON",
            'if not declared and header(scope, b"origin") is not None:',
            "if False:",
        ),
        (
            "colons of inner objects count as fields",
            "        if depth == 1:\n",
            "        if depth >= 1:\n",
        ),
        (
            "a long body may have a field less",
            "    if fields > MAX_FIELDS:\n",
            "    if fields >= MAX_FIELDS:\n",
        ),
    ),
    *mutations_of(
        "src/http/admin/health.py",
        (f"{_PAGES}::test_a_probe_says_less_to_another_name",),
        (
            "a probe says under any name where memory went",
            "is_trusted(call.scope, call.server.keys) and _is_for_us(call):",
            "is_trusted(call.scope, call.server.keys):",
        ),
    ),
    *mutations_of(
        "src/cli/serve.py",
        (f"{_PAGES}::test_serve_answers_to_the_name_that_it_was_told_to_listen_on",),
        (
            "who listens on all names answers to all",
            'if ALLOWED_HOST.fullmatch(host) and "*" not in host]',
            "if ALLOWED_HOST.fullmatch(host)]",
        ),
    ),
    *mutations_of(
        "src/http/server/body_work.py",
        (
            f"{_BODIES}::test_one_body_is_worked_on_at_a_time",
            f"{_BODIES}::test_longer_bodies_hold_up_themselves_alone",
            f"{_BODIES}::test_others_have_a_turn_between_two_long_bodies",
            f"{_BODIES}::test_owners_take_turns",
            f"{_BODIES}::test_owners_take_turns_in_what_else_is_computed",
        ),
        (
            "long bodies are worked on side by side",
            'TurnPool(1, "slipstream-long-bodies")',
            'TurnPool(9, "slipstream-long-bodies")',
        ),
        (
            "bodies of all owners stand in one line",
            "lane.submit(OWNER.get(),",
            'lane.submit("",',
        ),
        (
            "bodies wait for longer ones",
            "lane = _LONG if size > _LONG_BYTES else _MIDDLING",
            "lane = _LONG",
        ),
        (
            "what is computed of requests stands in one line",
            "_WORK.submit(OWNER.get(),",
            '_WORK.submit("",',
        ),
        (
            "all long bodies are decoded in one turn",
            "                await asyncio.sleep(0)\n",
            "                pass\n",
        ),
    ),
    *mutations_of(
        "src/http/server/codings.py",
        (
            f"{_BODIES}::test_members_are_joined_wherever_they_end",
            f"{_BODIES}::test_a_body_is_read_piece_by_piece",
            f"{_BODIES}::test_empty_members_cost_no_more_than_their_bytes",
        ),
        (
            "a body may have any number of members",
            "                if members > _MAX_MEMBERS:\n",
            "                if members > 1_000_000:\n",
        ),
        (
            "what does not fit into a piece is lost",
            "            rest = decoder.unconsumed_tail\n",
            '            rest = b""\n',
        ),
        (
            "a body that ends too early is taken",
            "    if decoder is not None:\n        raise",
            "    if decoder is None and not body:\n        raise",
        ),
    ),
    *mutations_of(
        "src/observability/logs.py",
        _LOGS,
        (
            "a message may have several lines",
            "return super().formatMessage(record).translate(_ESCAPES)",
            "return super().formatMessage(record)",
        ),
        (
            "tracebacks begin where records do",
            "return _behind_margin(super().formatException(ei))",
            "return super().formatException(ei)",
        ),
        (
            "escape sequences are left in tracebacks",
            "_MARGIN + line.translate(_ESCAPES) for line",
            "_MARGIN + line for line",
        ),
        (
            "the second half of control characters is let through",
            "*range(0x7F, 0xA0), 0x2028",
            "0x2028",
        ),
        (
            "Unicode's own line breaks end lines of JSON",
            "return encoded.translate(_JSON_ESCAPES)",
            "return encoded",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/compiler.py",
        ("tests/http/server/test_client_log_lines.py",),
        (
            "the log has the names of properties",
            "                len(verdict.dropped),\n",
            "                verdict.dropped,\n",
        ),
    ),
    *mutations_of(
        "src/engine/own_loop.py",
        ("tests/engine/test_own_loop.py",),
        (
            "an engine is used on any event loop",
            "if self._loop is not None and running is not self._loop:",
            "if False:",
        ),
        (
            "to check is to belong",
            "        running = asyncio._get_running_loop()\n",
            "        running = asyncio._get_running_loop()\n"
            "        self._loop = self._loop or running\n",
        ),
    ),
)
