"""``POST /v1/responses``, and what may be done with one that has been created."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import anyio
import msgspec

from src.core.errors import InvalidRequestError, QueueFullError, RequestAbortedError, RequestError
from src.core.outputs import FinishReason
from src.engine.requests.submission import Submission
from src.http.chat.handlers import ChatJob, chat_names, prepare_chat, with_client_names
from src.http.generation.field_names import with_client_field_names
from src.http.generation.generation import (
    check_end,
    describe_trace,
    forward,
    submitted,
    write_in_turns,
)
from src.http.generation.json_chunks import json_chunks
from src.http.generation.sampling import check_neutral
from src.http.generation.split_delta import split_delta
from src.http.protocol.chat import ChatMessage
from src.http.protocol.responses import (
    NEUTRAL_IN_RESPONSES,
    DeletedResponse,
    InputTokens,
    ResponseRequest,
)
from src.http.responses.encoder import Event, ResponseEncoder
from src.http.responses.event_log import EventLog
from src.http.responses.inputs import kept_items, page_of
from src.http.responses.store import ResponseStore, StoredResponse, said, said_more
from src.http.responses.translation import FIELD_NAMES, Translation, translate
from src.http.server.body import ClientDisconnectedError
from src.http.server.call import Call
from src.http.server.errors import answer_to
from src.http.server.fields import RequestDecoder
from src.http.server.keys import ADMITTED, credentials

_decode: Final = RequestDecoder(ResponseRequest)
_encode: Final = msgspec.json.Encoder().encode

_SEQUENCE: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
# Bytes of events after which they are counted among what is stored.
_COUNTED_BYTES: Final = 32 * 1024


async def create_response(call: Call) -> None:
    """Answer a conversation, as items; the next request may go on from the answer."""
    request = _decode(call)
    _check(request)
    owner = _owner(call)
    translation = _translated(call, request, owner)
    names = chat_names(translation.chat)
    try:
        drops_turns = request.truncation == "auto"
        chat = await prepare_chat(call, translation.chat, drops_turns=drops_turns)
        work = _Work(call, request, translation, chat, owner)
        begin = work.answer
        if request.background:
            begin = work.begin_background
        elif request.stream:
            begin = work.stream
        # An answer may take long, and there may be many.
        del request, translation, chat
        await begin()
    except RequestError as error:
        raise with_client_field_names(with_client_names(error, names), FIELD_NAMES) from None


async def show_response(call: Call) -> None:
    """A response that has been stored, as far as it has come; or its events, up to the last."""
    query = _query(call)
    stream = query.get("stream", ["false"])[-1]
    if stream not in ("true", "false"):
        raise InvalidRequestError(
            f"stream must be true or false, got {stream[:50]!r}", param="stream"
        )
    entry = _entry(call)
    if stream == "false":
        await call.answer(*json_chunks(entry.body))
        return
    after = query.get("starting_after", ["-1"])[-1]
    if after != "-1" and _SEQUENCE.fullmatch(after) is None:
        raise InvalidRequestError(
            f"starting_after must be the sequence_number of an event, got {after[:50]!r}",
            param="starting_after",
        )
    if entry.events is None:
        raise InvalidRequestError(
            "stream: only the events of a response that was created with background and stream "
            "are kept, as far as there is room for them",
            param="stream",
        )
    await _follow(call, entry.events, int(after))


async def _follow(call: Call, events: EventLog, after: int = -1) -> None:
    """Answer with events as they come. Whoever leaves ends nothing."""
    async with aclosing(events.read(after)) as portions:
        async for portion in portions:
            await call.write(portion)
    await call.end(b"")


async def list_input_items(call: Call) -> None:
    """What a stored response was asked with."""
    await call.answer(page_of(_entry(call).input, _query(call)))


async def count_input_tokens(call: Call) -> None:
    """How many tokens a request has as a prompt."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_RESPONSES)
    translation = _translated(call, request, _owner(call))
    names = chat_names(translation.chat)
    try:
        drops_turns = request.truncation == "auto"
        chat = await prepare_chat(call, translation.chat, drops_turns=drops_turns)
        ((prompt, _),) = chat.prompts
        token_ids = await chat.engine.tokenize(prompt, chat=chat.chat)
    except RequestError as error:
        raise with_client_field_names(with_client_names(error, names), FIELD_NAMES) from None
    await call.answer(_encode(InputTokens(len(token_ids))))


def _translated(call: Call, request: ResponseRequest, owner: bytes) -> Translation:
    store = _store_of(call)
    history: Sequence[ChatMessage] = ()
    if request.previous_response_id is not None:
        history = store.history(request.previous_response_id, owner)
    return translate(
        request,
        history,
        partial(store.item, owner=owner),
        # What is referred to is as much of the prompt as what is sent.
        call.server.config.http.max_body_bytes,
        media=call.server.config.chat.media_placeholders,
    )


def _entry(call: Call) -> StoredResponse:
    return _store_of(call).get(call.scope["path_params"]["response_id"], _owner(call))


def _query(call: Call) -> dict[str, list[str]]:
    return parse_qs(call.scope["query_string"].decode("latin-1"))


async def delete_response(call: Call) -> None:
    """Forget a response."""
    response_id = call.scope["path_params"]["response_id"]
    _store_of(call).delete(response_id, _owner(call))
    await call.answer(_encode(DeletedResponse(id=response_id)))


async def cancel_response(call: Call) -> None:
    """End a response that is being generated; one that has been cancelled is shown again."""
    entry = _entry(call)
    if entry.abort is not None:
        entry.abort()
    elif entry.body.status != "cancelled":
        raise InvalidRequestError(
            f"the response is {entry.body.status}: there is nothing to cancel any more",
            param="response_id",
        )
    await call.answer(*json_chunks(entry.body))


def _check(request: ResponseRequest) -> None:
    check_neutral(request, NEUTRAL_IN_RESPONSES)
    if request.background and request.store is False:
        raise InvalidRequestError(
            "background may only be given where the response is stored", param="background"
        )


def _store_of(call: Call) -> ResponseStore:
    return call.server.keep(ResponseStore)


def _owner(call: Call) -> bytes:
    """The owner of a stored response: the API key that the guard admitted, hashed.

    Otherwise one client would be as many owners as it can make up second keys. Where no key is
    needed nobody is told apart in earnest; the first one that is sent keeps honest clients apart.
    """
    admitted: bytes | None = call.scope.get(ADMITTED)
    if admitted is not None:
        # Keys of one owner are one client.
        tenant = call.tenant.encode()
        return hashlib.sha256(b"tenant " + tenant).digest() if tenant else admitted
    return hashlib.sha256(b"".join(credentials(call.scope)[:1])).digest()


def _settle(waited_for: asyncio.Future[None]) -> None:
    if not waited_for.done():
        waited_for.set_result(None)


class _Work:
    """One response being made."""

    def __init__(
        self,
        call: Call,
        request: ResponseRequest,
        translation: Translation,
        chat: ChatJob,
        owner: bytes,
    ) -> None:
        self._call = call
        self._chat = chat
        self._encoder = ResponseEncoder(request, translation, chat)
        self._stored = request.store is not False
        self._turn = said(translation.turn) if self._stored else b""
        self._entry = StoredResponse(body=self._encoder.response, owner=owner)
        self._log: EventLog | None = None
        if self._stored:
            find_item = partial(_store_of(call).item, owner=owner)
            self._entry.input = kept_items(request, find_item)
            if request.background and request.stream:
                self._log = self._entry.events = EventLog()
        # Until it is complete it is as large as what it was asked with, and what was said before.
        self._size = call.body_size + len(self._turn) + len(self._entry.input)
        self._counted = 0
        http = call.server.config.http
        self._bounds = {
            "max_entries": http.max_stored_responses,
            "max_bytes": http.max_stored_response_bytes,
        }
        describe_trace(call, self._encoder.response.id, request.model, stream=bool(request.stream))

    async def answer(self) -> None:
        """Answer with the whole response."""
        call = self._call
        chat = self._chat
        try:
            async with submitted(chat, call.id, call.trace) as (submission,):
                self._keep(submission)
                if not self._encoder.counts_logprobs:
                    # Nobody looks at it meanwhile.
                    await submission.wait_end()
                await self._read(submission)
        except RequestAbortedError as error:
            # Cancelled by another request: what there is of it is the answer.
            if self._encoder.response.status != "cancelled":
                self._encoder.failed(answer_to(error))
                raise
        except ClientDisconnectedError:
            raise
        except Exception as error:
            self._encoder.failed(answer_to(error))
            raise
        finally:
            self._end()
        await call.answer(*json_chunks(self._encoder.response))

    async def stream(self) -> None:
        """Answer with events."""
        call, encoder, chat = self._call, self._encoder, self._chat
        try:
            async with submitted(chat, call.id, call.trace) as (submission,):
                self._keep(submission)
                call.error_format = encoder
                await call.write(b"".join(encoder.opening()))
                await forward(call, 0, submission, encoder)
                ending = encoder.ending(submission.usage)
            # Whoever reads that it is complete may go on from it.
            self._end()
            await write_in_turns(call, ending)
            await call.end(b"")
        except ClientDisconnectedError:
            raise
        except Exception as error:
            encoder.failed(answer_to(error))
            raise
        finally:
            self._end()

    async def begin_background(self) -> None:
        """Answer as soon as it is queued, and go on."""
        server = self._call.server
        most = server.config.scheduler.max_waiting_requests
        if _store_of(self._call).num_running >= most:
            raise QueueFullError(
                f"{most} responses are being generated in the background already", retry_after=1.0
            )
        self._check_share()
        self._check_room()
        # It is held from the beginning: nothing that makes room may take it.
        self._entry.abort = self._encoder.cancelled
        self._store(self._size)
        queued = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(queued), name="slipstream-response")
        _store_of(self._call).keep_running(task)
        self._entry.abort = partial(self._cancel_task, task)
        # And not at the end of its coroutine, which never begins if it is cancelled at once.
        task.add_done_callback(lambda _: self._end())
        task.add_done_callback(lambda _: _settle(queued))
        try:
            # What cannot be queued is refused as if it were not for the background.
            await queued
        except BaseException:
            task.cancel()
            _store_of(self._call).forget(self._entry)
            raise
        if self._log is not None:
            await _follow(self._call, self._log)
        else:
            await self._call.answer(*json_chunks(self._encoder.response))

    def _check_share(self) -> None:
        """Refuse what would let one owner of keys hold the others up with background responses."""
        if not self._call.tenant:
            return
        server = self._call.server
        most = server.config.http.max_background_per_owner
        if _store_of(self._call).num_held(self._entry.owner) >= most:
            raise QueueFullError(
                f"{most} responses of this key are being generated in the background already",
                retry_after=1.0,
            )
        if not _store_of(self._call).leaves_room(self._entry.owner, self._size, **self._bounds):
            raise QueueFullError(
                "responses of this key that are being generated in the background take more room "
                "than they leave to other keys",
                retry_after=1.0,
            )

    def _check_room(self) -> None:
        store, bounds = _store_of(self._call), self._bounds
        if not bounds["max_entries"] or self._size > bounds["max_bytes"]:
            raise InvalidRequestError(
                "background: the response cannot be stored, for it would be over "
                "http.max_stored_responses or http.max_stored_response_bytes",
                param="background",
            )
        if not store.has_room(self._size, **bounds):
            raise QueueFullError(
                "the responses that are being generated in the background take all the room there "
                "is for stored ones",
                retry_after=1.0,
            )

    async def _run(self, queued: asyncio.Future[None]) -> None:
        chat = self._chat
        try:
            async with submitted(chat, self._call.id, None) as (submission,):
                if self._log is not None:
                    self._log_events(self._encoder.opening())
                _settle(queued)
                await self._read(submission)
        except Exception as error:
            if queued.done():
                # Nobody waits for it any more: what went wrong is part of the response.
                self._encoder.failed(answer_to(error))
            else:
                queued.set_exception(error)

    async def _read(self, submission: Submission) -> None:
        encoder = self._encoder
        has_output = False
        while deltas := await submission.take():
            self._drain(encoder.begun())
            for delta in deltas:
                has_output = has_output or bool(delta.token_ids)
                if delta.finish_reason is FinishReason.ABORT:
                    # What came before that counts.
                    self._drain(encoder.take(msgspec.structs.replace(delta, finish_reason=None)))
                check_end(delta.finish_reason, has_output=has_output)
                for portion in split_delta(delta):
                    self._drain(encoder.take(portion))
                    # Others get their turn.
                    await anyio.lowlevel.checkpoint()
        self._drain(encoder.finish(submission.usage))

    def _drain(self, events: Iterable[Event]) -> None:
        """Take events: who reads them gets them, and otherwise only the items count."""
        if self._log is None:
            for _ in events:
                pass
        else:
            self._log_events(self._encoder.encoded(events))

    def _log_events(self, events: list[bytes]) -> None:
        """Keep events, and count them now and then; what there is no room for is let go of."""
        log = self._log
        if log is None:
            return
        log.add(events)
        store = _store_of(self._call)
        if self._entry.events is None or not store.has(self._entry):
            # Nobody can begin to read it any more.
            log.let_go()
            return
        if log.size - self._counted < _COUNTED_BYTES:
            return
        if store.has_room(log.size - self._counted, **self._bounds):
            self._counted = log.size
            self._store(self._size + log.size)
        else:
            # Readers that are there get the rest all the same.
            self._entry.events = None
            log.let_go()

    def _keep(self, submission: Submission) -> None:
        self._store(self._size)
        self._entry.abort = partial(self._cancel_submission, submission)

    def _cancel_task(self, task: asyncio.Task[None]) -> None:
        self._encoder.cancelled()
        task.cancel()

    def _cancel_submission(self, submission: Submission) -> None:
        self._encoder.cancelled()
        submission.abort()

    def _store(self, size: int) -> None:
        if self._stored:
            _store_of(self._call).put(self._entry, size, **self._bounds)

    def _end(self) -> None:
        """It goes on no further: from here on it may be gone on from."""
        entry, encoder = self._entry, self._encoder
        if entry.abort is None:
            return
        entry.abort = None
        encoder.cancelled()
        if encoder.response.status in ("failed", "cancelled"):
            encoder.cut_short()
        if self._log is not None:
            if encoder.response.status in ("failed", "cancelled"):
                self._log.add(encoder.end_early())
            self._log.close()
        if not _store_of(self._call).has(entry):
            return
        if encoder.response.status in ("completed", "incomplete"):
            entry.messages = said_more(self._turn, encoder.message)
        size = len(entry.messages or b"") + len(entry.input)
        size += sum(map(len, json_chunks(entry.body)))
        if entry.events is not None:
            with_events = size + entry.events.size
            if _store_of(self._call).has_room(with_events, **self._bounds):
                size = with_events
            else:
                # Rather than the response itself.
                entry.events = None
        self._store(size)
