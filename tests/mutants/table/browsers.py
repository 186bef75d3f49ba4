"""Of who asks in a browser's name, of long bodies, of lines of the log, and of event loops."""

from tests.mutants.mutation import rewrites_of

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
    *rewrites_of(
        "src/http/server/browsers.py",
        _WHO,
        (
            "pages may delete",
            "_SAFE_METHODS",
            "{'GET', 'HEAD', 'OPTIONS'}",
            "{'DELETE', 'GET', 'HEAD', 'OPTIONS'}",
        ),
        (
            "of two origins the first one counts",
            "is_foreign_page",
            "len(A) > 1 or b'null' in A",
            "b'null' in A",
        ),
        (
            "pages without an origin are the server's own, if the browser says so",
            "is_foreign_page",
            "len(A) > 1 or b'null' in A",
            "len(A) > 1",
        ),
        (
            "pages of the same site are the server's own",
            "is_foreign_page",
            "A != [b'none']",
            "A not in ([b'none'], [b'same-site'])",
        ),
        (
            "a browser that names no site is believed whatever the origin is",
            "is_foreign_page",
            "bool(A) and (not _is_own_origin(B, A[0]))",
            "bool(A) and (not sites) and (not _is_own_origin(B, A[0]))",
        ),
        (
            "an origin is its host, whatever the scheme is",
            "_is_own_origin",
            "A != B.get('scheme', 'http') or len(C) != 1",
            "len(C) != 1",
        ),
        (
            "of two hosts the first one counts for an origin",
            "_is_own_origin",
            "len(A) != 1",
            "not A",
        ),
        (
            "an origin begins like the host",
            "_is_own_origin",
            "A.removesuffix(B) == C.removesuffix(B)",
            "A.removesuffix(B).startswith(C.removesuffix(B))",
        ),
        (
            "a port that is the scheme's has to be written, or left out, on both sides",
            "_is_own_origin",
            "A.removesuffix(B) == C.removesuffix(B)",
            "A == C",
        ),
        (
            "of two hosts one that is known is enough",
            "is_known_host",
            "all",
            "any",
        ),
        (
            "a host begins like one that is known",
            "_is_known",
            "_HOST.fullmatch",
            "_HOST.match",
        ),
        (
            "names that end like one are below it",
            "_is_named",
            "1",
            "2",
        ),
        (
            "addresses need an entry",
            "_is_known",
            "not A or is_address(A)",
            "not A",
        ),
        (
            "names have to be written in small letters in the settings",
            "_is_named",
            "A = A.lower()",
            "",
        ),
    ),
    *rewrites_of(
        "src/http/server/guard.py",
        (_PAGES,),
        (
            "pages of other origins may use all there is",
            "Guard._refusal",
            "is_foreign_page(A, B.cors_origins)",
            "False",
        ),
        (
            "any name is answered where there are no keys",
            "Guard._refusal",
            "not len(A.api) and (not is_known_host(B, C.allowed_hosts))",
            "False",
        ),
        (
            "names are looked at where there are keys",
            "Guard._refusal",
            "not len(A.api) and (not is_known_host(B, C.allowed_hosts))",
            "not is_known_host(B, C.allowed_hosts)",
        ),
        (
            "an admin key is taken for a lock of the API",
            "Guard._refusal",
            "not len(A.api) and (not is_known_host(B, C.allowed_hosts))",
            "not len(A.api) and (not len(A.admin)) and (not is_known_host(B, C.allowed_hosts))",
        ),
        (
            "names in the settings are not looked at",
            "check_access",
            "ALLOWED_HOST.fullmatch",
            "ALLOWED_HOST.match",
        ),
    ),
    *rewrites_of(
        "src/http/server/body.py",
        (_PAGES, f"{_BODIES}::test_a_long_body_has_a_bounded_number_of_fields"),
        (
            "a page's body without a type is JSON",
            "check_content_type",
            "not A and header(B, b'origin') is not None",
            "False",
        ),
        (
            "colons of inner objects count as fields",
            "_check_fields",
            "A == 1",
            "A >= 1",
        ),
        (
            "a long body may have a field less",
            "_check_fields",
            "A > MAX_FIELDS",
            "A >= MAX_FIELDS",
        ),
    ),
    *rewrites_of(
        "src/http/admin/health.py",
        (f"{_PAGES}::test_a_probe_says_less_to_another_name",),
        (
            "a probe says under any name where memory went",
            "health",
            "A is not None and is_trusted(B.scope, B.server.keys) and _is_for_us(B)",
            "A is not None and is_trusted(B.scope, B.server.keys)",
        ),
    ),
    *rewrites_of(
        "src/cli/serve.py",
        (f"{_PAGES}::test_serve_answers_to_the_name_that_it_was_told_to_listen_on",),
        (
            "who listens on all names answers to all",
            "with_own_names",
            "ALLOWED_HOST.fullmatch(A) and '*' not in A",
            "ALLOWED_HOST.fullmatch(A)",
        ),
    ),
    *rewrites_of(
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
            "_LONG",
            "TurnPool(1, 'slipstream-long-bodies')",
            "TurnPool(9, 'slipstream-long-bodies')",
        ),
        (
            "bodies of all owners stand in one line",
            "beside_the_loop",
            "OWNER.get()",
            "''",
        ),
        (
            "bodies wait for longer ones",
            "beside_the_loop",
            "_LONG if A > _LONG_BYTES else _MIDDLING",
            "_LONG",
        ),
        (
            "what is computed of requests stands in one line",
            "in_turn",
            "OWNER.get()",
            "''",
        ),
        (
            "all long bodies are decoded in one turn",
            "Turns.take",
            "await asyncio.sleep(0)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/http/server/codings.py",
        (
            f"{_BODIES}::test_members_are_joined_wherever_they_end",
            f"{_BODIES}::test_a_body_is_read_piece_by_piece",
            f"{_BODIES}::test_empty_members_cost_no_more_than_their_bytes",
        ),
        (
            "a body may have any number of members",
            "_decoded",
            "A > _MAX_MEMBERS",
            "A > 1000000",
        ),
        (
            "what does not fit into a piece is lost",
            "_decoded",
            "A.unconsumed_tail",
            "b''",
        ),
        (
            "a body that ends too early is taken",
            "_decoded",
            "A is not None",
            "A is None and (not body)",
        ),
    ),
    *rewrites_of(
        "src/observability/logs.py",
        _LOGS,
        (
            "a message may have several lines",
            "TextFormatter.formatMessage",
            "super().formatMessage(A).translate(_ESCAPES)",
            "super().formatMessage(A)",
        ),
        (
            "tracebacks begin where records do",
            "TextFormatter.formatException",
            "_behind_margin(super().formatException(A))",
            "super().formatException(A)",
        ),
        (
            "escape sequences are left in tracebacks",
            "_behind_margin",
            "A.translate(_ESCAPES)",
            "A",
        ),
        (
            "the second half of control characters is let through",
            "_CONTROLS",
            "(*range(32), *range(127, 160), 8232, 8233)",
            "(*range(32), 8232, 8233)",
        ),
        (
            "Unicode's own line breaks end lines of JSON",
            "JsonFormatter.format",
            "A.translate(_JSON_ESCAPES)",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/compiler.py",
        ("tests/http/server/test_client_log_lines.py",),
        (
            "the log has the names of properties",
            "GrammarCompiler._tried",
            "len(A.dropped)",
            "A.dropped",
        ),
    ),
    *rewrites_of(
        "src/engine/own_loop.py",
        ("tests/engine/test_own_loop.py",),
        (
            "an engine is used on any event loop",
            "OwnLoop.check",
            "self._loop is not None and A is not self._loop",
            "False",
        ),
        (
            "to check is to belong",
            "OwnLoop.check",
            "if self._loop is not None and A is not self._loop: B",
            "self._loop = self._loop or A\nif self._loop is not None and A is not self._loop: B",
        ),
    ),
)
