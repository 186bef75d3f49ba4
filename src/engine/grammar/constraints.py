"""Constraints of llguidance's C interface, which can be followed without the interpreter lock.

The library's wheel exports the C interface (llguidance.h) beside its Python one. Matchers (Python)
and constraints (C) compute the same, and clones share the lexer of their original. But a constraint
has an address, so the kernel library can pass tokens to all rows and compute their masks in one
call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from llguidance import _lib

from src.core.cpus import usable_cpus
from src.engine.grammar.limits import STEP_LEXER_FUEL, STEP_MAX_ITEMS
from src.engine.grammar.vocabulary import Vocabulary

# Limit for the lexers of all lanes of one grammar. A state takes about 2 KB while the grammar is
# cached; a schema of some properties has several hundred states.
MAX_LANE_STATES: Final = 10_000
# More threads do not help, because a mask takes only some tens of microseconds.
_MAX_LANES: Final = 4
# The library's prefix for the name of a special token.
_SPECIAL: Final = b"\xff"
# Structures contain no size field, so another minor version may have other layouts.
_VERSION: Final = b"llguidance@1.9."
_MAX_MESSAGE_BYTES: Final = 500


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", POINTER(c_uint32)),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", c_void_p),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", c_void_p),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


class _ConstraintInit(ctypes.Structure):
    """LlgConstraintInit, with LlgParserLimits."""

    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
        # Space for fields that a later version of the library may fill in.
        ("later", ctypes.c_char * 512),
    )


class _MaskResult(ctypes.Structure):
    """LlgMaskResult."""

    _fields_ = (("sample_mask", c_void_p), ("temperature", ctypes.c_float), ("is_stop", c_bool))


class CInterface:
    """Functions of llguidance.h. Calls release the interpreter lock.

    Raises
    ------
    AttributeError
        A symbol is missing, or the version does not match.
    OSError
        The file cannot be loaded as a shared library.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pointer = c_void_p

        def bound(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            return function

        version = bound("llg_get_version", c_char_p)()
        if _VERSION not in version:
            raise AttributeError(f"expected {_VERSION!r}, got {version!r}")
        self.new_tokenizer = bound(
            "llg_new_tokenizer_v2", pointer, POINTER(_TokenizerInit), c_char_p, c_size_t
        )
        self.free_tokenizer = bound("llg_free_tokenizer", None, pointer)
        self.set_defaults = bound(
            "llg_constraint_init_set_defaults", None, POINTER(_ConstraintInit), pointer
        )
        self.new_constraint = bound(
            "llg_new_constraint_lark", pointer, POINTER(_ConstraintInit), c_char_p
        )
        self.clone_constraint = bound("llg_clone_constraint", pointer, pointer)
        self.free_constraint = bound("llg_free_constraint", None, pointer)
        self.compute_mask = bound("llg_compute_mask", c_int32, pointer, POINTER(_MaskResult))
        self.commit_token = bound("llg_commit_token", c_int32, pointer, c_uint32, pointer)

    @property
    def matcher_functions(self) -> tuple[int, int]:
        """Addresses of the functions that commit a token and that compute a mask."""
        given = self.commit_token, self.compute_mask
        commit, compute = (ctypes.cast(function, c_void_p).value or 0 for function in given)
        return commit, compute


@functools.cache
def c_interface() -> CInterface | None:
    """The C interface of the installed wheel; ``None`` if it has none."""
    try:
        return CInterface(_lib.__file__)
    except (AttributeError, OSError):
        return None


@functools.cache
def num_lanes() -> int:
    """Lanes per grammar: the number of threads that advance constraints in parallel."""
    return max(1, min(_MAX_LANES, usable_cpus() // 2))


def constraint_tokenizer(vocabulary: Vocabulary) -> ConstraintTokenizer | None:
    """The vocabulary for constraints; ``None`` if the wheel has no C interface."""
    library = c_interface()
    return None if library is None else ConstraintTokenizer(library, vocabulary)


class ConstraintTokenizer:
    """A vocabulary in the form of the C interface.

    Attributes
    ----------
    vocab_size
        Width of the masks.
    """

    def __init__(self, library: CInterface, vocabulary: Vocabulary) -> None:
        self._library = library
        self._address: int | None = None
        self.vocab_size = len(vocabulary.tokens)
        tokens = list(vocabulary.tokens)
        for token_id in vocabulary.special_ids:
            if not tokens[token_id].startswith(_SPECIAL):
                tokens[token_id] = _SPECIAL + tokens[token_id]
        message = ctypes.create_string_buffer(_MAX_MESSAGE_BYTES)
        first, *others = vocabulary.end_ids
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(tokens),
            tok_eos=first,
            token_lens=_uint32s(list(map(len, tokens))),
            token_bytes=b"".join(tokens),
            use_approximate_greedy_tokenize_fn=True,
            tok_eos_extra=_uint32s(others),
            tok_eos_extra_count=len(others),
        )
        self._address = library.new_tokenizer(init, message, _MAX_MESSAGE_BYTES)
        if self._address is None:
            raise ValueError(message.value.decode(errors="replace"))

    def __del__(self) -> None:
        if self._address is not None:
            self._library.free_tokenizer(self._address)

    def compile(self, lark: str, max_lexer_states: int) -> Constraint | None:
        """A constraint at the beginning, with its first mask computed; ``None`` if that fails."""
        text = lark.encode()
        # A zero byte would end the C string.
        if b"\0" in text:
            return None
        init = _ConstraintInit()
        self._library.set_defaults(init, self._address)
        init.log_stderr_level = 0
        init.step_lexer_fuel = STEP_LEXER_FUEL
        init.step_max_items = STEP_MAX_ITEMS
        init.max_lexer_states = max_lexer_states
        init.verbose_errors = False
        root = Constraint(self._library, self._library.new_constraint(init, text), self)
        # Clones share the lexer, so this mask warms it for all of them.
        first = root.clone()
        if self._library.compute_mask(first.address, _MaskResult()):
            return None
        return root


class Constraint:
    """The state of one output in its grammar.

    All clones of one constraint share its lexer, with the lexer's limit and its errors. A
    constraint does not distinguish a complete output from one that no token continues.

    Attributes
    ----------
    address
        For functions of the C interface. After each mask it takes one token.
    tokenizer
        Of the vocabulary that it was compiled for.
    """

    __slots__ = ("_library", "address", "tokenizer")

    def __init__(self, library: CInterface, address: int, tokenizer: ConstraintTokenizer) -> None:
        self._library = library
        self.address = address
        # Kept alive for as long as the constraint.
        self.tokenizer = tokenizer

    def __del__(self) -> None:
        self._library.free_constraint(self.address)

    def clone(self) -> Constraint:
        """A copy in the same state."""
        address = self._library.clone_constraint(self.address)
        return Constraint(self._library, address, self.tokenizer)


def _uint32s(numbers: Sequence[int]) -> Any:
    return (c_uint32 * len(numbers))(*numbers)
