"""Of plugins: what is loaded, and logits processors."""

from tests.mutants.mutation import mutations_of, rewrites_of

_PROCESSOR_TESTS = ("tests/engine/sampling/test_processors.py",)
_PLUGIN_TESTS = ("tests/engine/test_plugins.py",)

MUTATIONS = (
    *mutations_of(
        "src/engine/sampling/processors.py",
        _PROCESSOR_TESTS,
        (
            "a processor brings back what a grammar has ruled out",
            "        bounded = torch.where(before > BANNED, bounded, before)\n",
            "",
        ),
        (
            "a processor lifts a ban by ruling out all other tokens",
            "torch.where(before > BANNED, after, -torch.inf)",
            "after",
        ),
        (
            "a row of banned tokens ends for its processor",
            " | (before.amax(1) <= BANNED)",
            "",
        ),
        (
            "a request goes on after its processor failed",
            "both = is_sound.index_select(0, self._entries_s) & sound",
            "both = is_sound.index_select(0, self._entries_s)",
        ),
        ("arguments are gathered in every step", "if not self._gathered:", "if True:"),
        (
            "a processor changes the rows of others",
            "logits.index_copy_(0, self._entries_s, bounded)",
            "logits[: len(bounded)] = bounded",
        ),
        (
            "tokens are those of the first rows",
            "self._tokens.index_select(0, self._rows)",
            "self._tokens[: len(self._rows)]",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/selection.py",
        _PROCESSOR_TESTS,
        (
            "only the first processor of a request is applied",
            "range(max(len(row.processors) for row in params) if params else 0)",
            "range(1)",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/state.py",
        _PROCESSOR_TESTS,
        (
            "a row whose request names a processor only draws",
            "            and not self.processors\n",
            "",
        ),
    ),
    *rewrites_of(
        "src/core/plugins.py",
        _PLUGIN_TESTS,
        (
            "a package that ends the process on import ends it without a name",
            "load_plugins",
            "(Exception, SystemExit)",
            "Exception",
        ),
        (
            "names of packages are compared letter by letter",
            "_normalized",
            "re.sub('[-_.]+', '-', A).lower()",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/plugins.py",
        _PLUGIN_TESTS,
        (
            "an engine's syntax need not exist",
            "use_plugins",
            "check_syntaxes(A.chat)",
            "",
        ),
    ),
    *rewrites_of(
        "src/core/plugins.py",
        _PLUGIN_TESTS,
        (
            "of two plugins of a name the last on the path is shown",
            "installed_plugins",
            "A and B and (_normalized(B) not in C)",
            "A and B",
        ),
    ),
    *rewrites_of(
        "src/engine/plugins.py",
        _PLUGIN_TESTS,
        (
            "a processor's name may have a character more",
            "_check_processor",
            "1 <= len(A) <= 64",
            "1 <= len(A) <= 65",
        ),
    ),
)
