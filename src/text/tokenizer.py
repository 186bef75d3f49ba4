"""The tokenizer of a Hugging Face checkpoint, read without transformers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from src.core.errors import InvalidRequestError, ModelLoadError, UnavailableError
from src.core.gguf import is_gguf
from src.text.chat_template import ChatTemplate, read_chat_templates, read_template
from src.text.expressions import is_panic, require_short_matches
from src.text.pieces import CLEAN_UPS, PieceTable
from src.text.quoted import QuotingTokenizer
from src.text.template_pool import TemplatePool, TemplatePools
from src.text.token_length import max_token_chars
from src.text.tokenizer_files import read_backend, read_json

logger = logging.getLogger(__name__)


class PairEncoding(NamedTuple):
    """The tokens of two texts that the tokenizer has joined.

    Attributes
    ----------
    ids
        Token ids.
    types
        The kind of each, which models that compare texts read.
    sequences
        For each, whose token it is: 0 or 1; None: a special one.
    """

    ids: list[int]
    types: list[int]
    sequences: list[int | None]


class Tokenizer:
    """Text to token ids and back, as transformers does it for the same directory.

    Every method may be called from several threads at once; `encode` lets other threads run.

    Parameters
    ----------
    backend
        The tokenizer proper. Truncation and padding are switched off on it.
    special_tokens
        Text of the named special tokens: ``bos_token``, ``eos_token`` and so on.
    chat_template
        The checkpoint's template, or None.
    clean_up_tokenization_spaces
        As in ``tokenizer_config.json``; has no effect on BPE, as in transformers.

    Raises
    ------
    ModelLoadError
        The decoder is of a kind whose text cannot be streamed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        clean_up_tokenization_spaces: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self._chat_template = chat_template
        self._made_quoting: QuotingTokenizer | None = None
        self.pool_of_clients: TemplatePool | None = None
        """Where templates of requests are rendered; by default where all others are."""
        self.cleans_up = clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
        """Whether `decode` removes the spaces before punctuation and English contractions."""
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        """Text of the tokens that were added to the vocabulary, special or not."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, those added included."""
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pieces = PieceTable(backend)
        self.special_ids = _special_ids(backend)
        """Ids that ``skip_special_tokens`` leaves out."""

    @classmethod
    def from_directory(cls, path: Path, chat_template: Path | str | None = None) -> Tokenizer:
        """Read the tokenizer and what stands beside it; of a GGUF file, what stands in it.

        `src.text.tokenizer_files` says which files count. The chat template is the file
        ``chat_template``, or what the checkpoint brings; see `read_chat_templates`. Whether a bos
        or eos token is added is the affair of the post-processor in ``tokenizer.json``:
        ``add_bos_token`` in the configuration has no effect beside it, as in transformers.

        Raises
        ------
        ModelLoadError
            A file is missing or damaged, or of a kind that is not supported.
        """
        config: dict[str, Any] = {}
        own: Any
        if is_gguf(path):
            # Imported here because few checkpoints need it.
            from src.text.gguf_tokenizer import read_gguf_tokenizer

            backend, special_tokens, own = read_gguf_tokenizer(path)
        elif path.is_dir():
            config = read_json(path / "tokenizer_config.json")
            backend, special_tokens = read_backend(path, config)
            require_short_matches(backend, str(path))
            own = config.get("chat_template")
        else:
            raise ModelLoadError(f"tokenizer: expected a directory or a GGUF file, got {path}")
        if chat_template is not None:
            templates = {"default": read_template(Path(chat_template).expanduser())}
        else:
            templates = read_chat_templates(path if path.is_dir() else path.parent, own)
        template = ChatTemplate(templates, special_tokens=special_tokens) if templates else None
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=template,
            clean_up_tokenization_spaces=config.get("clean_up_tokenization_spaces") is True,
        )

    def fit_model(self, vocab_size: int) -> list[int]:
        """Count as special no token that a model of so many token ids does not have.

        A tag that is such a token can be written as text alone. Returns the ids that the tokenizer
        has and the model does not, sorted: whoever encodes a text has to look for them.
        """
        self.special_ids = frozenset(i for i in self.special_ids if i < vocab_size)
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return sorted(token_id for token_id in ids if token_id >= vocab_size)

    def differs_from(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """The first token id, with both tokens, that two tokenizers know as different tokens."""
        own, others = (
            {number: token for token, number in each.get_vocab(with_added_tokens=True).items()}
            for each in (self._backend, other._backend)
        )
        shared = sorted(own.keys() & others.keys())
        found = next((number for number in shared if own[number] != others[number]), None)
        return None if found is None else (found, own[found], others[found])

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template.

        Raises
        ------
        InvalidRequestError
            It has none.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template; complete a plain prompt instead",
                param="messages",
            )
        return self._chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return self._chat_template is not None

    def render_in(self, pools: TemplatePools) -> None:
        """Render chat templates in these processes, and try the checkpoint's out. Blocks.

        One that cannot be tried out is a matter of requests with messages; it is logged.
        """
        self.pool_of_clients = pools.of_clients
        if self._chat_template is None:
            pools.own.close()
            return
        self._chat_template.use_pool(pools.own)
        try:
            fault = self._chat_template.prepare()
        except UnavailableError as error:
            fault = error.message
        if fault is not None:
            logger.warning("no conversation can be served, prompts without messages can: %s", fault)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Most characters of a text for each of its tokens; ``sys.maxsize`` if unbounded."""
        return max_token_chars(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with bos (and what else the model wants) if asked.

        A rendered chat template has its special tokens in it: encode it without adding any.

        Raises
        ------
        InvalidRequestError
            The text has a lone surrogate, so it is no Unicode text; or the tokenizer gives up.
        """
        ids: list[int] = self._encoded(text, add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str, add_special_tokens: bool = True) -> PairEncoding:
        """Two texts as one, as the tokenizer joins a pair of sequences; errors as of `encode`."""
        found = self._encoded((first, second), add_special_tokens)
        return PairEncoding(found.ids, found.type_ids, found.sequence_ids)

    def prepare_quoting(self) -> None:
        """Make what `quoted` and `encode_quoted` need. Takes a second or so, call it at the start.

        `fit_model` comes before it, since it says which tokens are special.
        """
        special = {i: text for i, text in self.added_tokens.items() if i in self.special_ids}
        self._made_quoting = QuotingTokenizer(self._backend, special)

    @property
    def _quoting(self) -> QuotingTokenizer:
        # Not made here: no other thread could run meanwhile.
        if self._made_quoting is None:
            raise RuntimeError("prepare_quoting comes before texts are quoted")
        return self._made_quoting

    def quoted(self, text: str) -> str | None:
        """A text for `encode_quoted`; None: it may stand in a text for `encode` as it is."""
        quoted = self._quoting.quoted(text)
        return None if quoted is text and not self._quoting.is_for_all else quoted

    def encode_quoted(self, whole: str) -> list[int]:
        """Token ids of a template in which texts stand that are no special tokens.

        Such a text is what `quoted` makes, or any other without the text of a special token. Errors
        are those of `encode`, and `prepare_quoting` comes before.
        """
        quoting = self._quoting
        ids: list[int] = self._encoded(quoting.exchanged(whole), False, quoting.second).ids
        return ids

    def encode_own(self, text: str) -> list[int]:
        """Token ids of a text of others alone, as far as it has them within a template too."""
        quoted = self.quoted(text)
        return self.encode(text, False) if quoted is None else self.encode_quoted(quoted)

    def _encoded(
        self,
        given: str | tuple[str, str],
        add_special_tokens: bool,
        backend: Backend | None = None,
    ) -> Any:
        for text in (given,) if isinstance(given, str) else given:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"text: expected valid Unicode, got the lone surrogate "
                    f"U+{ord(text[error.start]):04X} at character {error.start}"
                ) from None
        try:
            # The batch form lets other threads run, and the fast one computes no offsets.
            encodings = (backend or self._backend).encode_batch_fast(
                [given], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequestError(
                "text: an expression by which this model's tokenizer splits text backtracks "
                "without end in this text; the checkpoint is at fault"
            ) from None
        return encodings[0]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids`` alone, exactly as transformers' ``decode`` does.

        The text of a model's output, which follows a prompt, is `src.text.detokenizer.detokenize`.
        """
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if self.cleans_up:
            for old, new in CLEAN_UPS:
                text = text.replace(old, new)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an id without one."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds after another: possibly a part of a character."""
        return self.pieces.later(token_id)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, U+FFFD for what is not a whole character."""
        return self.pieces.later(token_id).decode("utf-8", errors=self.pieces.errors)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def _special_ids(backend: Backend) -> frozenset[int]:
    """Return the ids that the backend's ``decode`` skips as special tokens.

    These may be more than those flagged: a token that was special stays skipped, whatever flags it
    got later.
    """
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    others = [token_id for token_id in added if token_id not in special]

    def shown(token_ids: list[int], skips: bool) -> str:
        text: str = backend.decode(token_ids, skip_special_tokens=skips)
        return text

    if others and shown(others, True) != shown(others, False):
        special |= {i for i in others if shown([i], True) != shown([i], False)}
    return frozenset(special)
