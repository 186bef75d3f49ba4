"""``POST /v1/chat/completions``."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from src.core.config import ChatSection
from src.core.errors import RequestError
from src.core.sampling_params import THINKING_BUDGET, SamplingParams
from src.core.structured_output import StructuredOutput
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions
from src.http.chat.conversation import conversation
from src.http.chat.encoder import ChatEncoder
from src.http.chat.tools import tool_offer
from src.http.chat.truncation import newest_turns, tokens_of_answer
from src.http.generation.generation import run
from src.http.generation.job import GenerationJob
from src.http.generation.prompts import Cut, cut_of
from src.http.generation.sampling import (
    FieldNames,
    check_top_logprobs,
    num_logprobs,
    refuse_unsupported,
    sampling_params,
    unsupported,
)
from src.http.generation.structured import structured_output
from src.http.generation.thinking import no_thinking, thinking_budget
from src.http.protocol.chat import ChatRequest
from src.http.server.body_work import in_turn
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name
from src.text.answer import ToolOffer
from src.text.answer_plan import AnswerPlan, plan_answer, reasoning_of
from src.text.chat_messages import final_text

_decode: Final = RequestDecoder(ChatRequest)
# What the engine calls the messages of a chat, where its errors begin with it.
_PROMPT: Final = re.compile(r"\Aprompt\b")


async def create_chat_completion(call: Call) -> None:
    """Answer a conversation ``n`` times."""
    request = _decode(call)
    names = chat_names(request)
    try:
        job = await prepare_chat(call, request)
        encoder = ChatEncoder(
            request,
            job.engine,
            job.plan,
            model=job.model,
            prompt_token_ids=job.prompt_token_ids[0] if job.prompt_token_ids else None,
        )
        # An answer may take long, and there may be many.
        del request
        await run(call, job, encoder)
    except RequestError as error:
        raise with_client_names(error, names) from None


class ChatJob(GenerationJob, kw_only=True):
    """A conversation; ``plan`` reads the answers."""

    plan: AnswerPlan


async def prepare_chat(
    call: Call,
    request: ChatRequest,
    *,
    drops_turns: bool = False,
    needs_thinking: bool = True,
) -> ChatJob:
    """Check a request and turn it into a job, for every endpoint that holds conversations.

    With ``drops_turns`` a conversation that is too long loses its oldest turns. With
    ``needs_thinking``, refuse a thinking budget for models without reasoning tags.

    Raises
    ------
    SlipstreamError
        The request cannot be served; `with_client_names` names its fields as a client does.
    """
    refuse_unsupported(request)
    settings = call.server.config.chat
    messages, options = await conversation(request, call.server.config, call.tenant)
    offer = tool_offer(request)
    logprobs = check_top_logprobs(request.logprobs, request.top_logprobs)
    engine = await call.admitted_engine()
    model = served_name(engine, request.model)
    # Now, not after anything is awaited: an adapter that goes meanwhile is missed, not passed over.
    lora = adapter_name(engine, model)
    params = sampling_params(
        request,
        engine.model_info.default_sampling,
        max_tokens=_max_tokens(request),
        logprobs=logprobs,
        structured_output=structured_output(request, engine.config),
    )
    reasons = reasoning_of(engine.tokenizer, settings, request.chat_template) is not None
    messages, token_ids = await _prompt(
        engine, request, messages, options, drops_turns=drops_turns, reasons=reasons
    )
    plan = await _plan(
        engine,
        settings,
        token_ids or (),
        offer,
        template=request.chat_template,
        continued=final_text(messages) if options.continue_final_message else None,
        structured_output=params.structured_output,
    )
    budget = _budget(request, params, plan, reasons=reasons, needs_thinking=needs_thinking)
    params = msgspec.structs.replace(
        params,
        structured_output=plan.structured_output,
        kept_special_token_ids=plan.kept_special_token_ids,
        thinking=None if budget is None and not params.stop else plan.thinking(budget),
    )
    return ChatJob.of(
        call,
        request,
        engine,
        model,
        prompts=[(messages if token_ids is None else token_ids, params)],
        prompt_token_ids=None if token_ids is None else [token_ids],
        num_prompt_logprobs=num_logprobs(request.prompt_logprobs) * len(token_ids or ()),
        chat=options,
        lora=lora,
        plan=plan,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    newer = request.max_completion_tokens
    return request.max_tokens if newer is None else newer


async def _prompt(
    engine: AsyncEngine,
    request: ChatRequest,
    messages: list[dict[str, Any]],
    options: ChatOptions,
    *,
    drops_turns: bool,
    reasons: bool,
) -> tuple[list[dict[str, Any]], list[int] | None]:
    """The messages that are left, and their token ids if they are needed before the engine's turn.

    They are where the prompt is cut, shown or scored, and where its end may open thinking.
    """
    info = engine.model_info
    reserved = tokens_of_answer(info, _max_tokens(request))
    cut = cut_of(request, info.max_model_len, reserved)
    token_ids = None
    if drops_turns:
        cut = Cut(info.max_model_len - reserved)
        messages, token_ids = await newest_turns(engine, messages, options, cut.keep)
    scores = num_logprobs(request.prompt_logprobs) > 0
    if cut is None and not (request.return_token_ids or reasons or scores):
        return messages, None
    if token_ids is None:
        token_ids = await engine.tokenize(messages, chat=options)
    return messages, token_ids if cut is None else cut.tokens(token_ids)


def _budget(
    request: ChatRequest,
    params: SamplingParams,
    plan: AnswerPlan,
    *,
    reasons: bool,
    needs_thinking: bool,
) -> int | None:
    """Tokens of thinking at most, or the refusal of a budget that could not be kept."""
    budget = thinking_budget(request)
    if budget is None:
        return None
    if needs_thinking and not reasons:
        raise no_thinking()
    own = params.structured_output
    if own is not None and own.kind == "grammar" and plan.structured_output == own:
        # Such a grammar says itself what comes before the answer.
        if needs_thinking:
            raise unsupported(THINKING_BUDGET, " beside a grammar")
        return None
    return budget


async def _plan(
    engine: AsyncEngine,
    settings: ChatSection,
    prompt_token_ids: Sequence[int],
    offer: ToolOffer,
    *,
    template: str | None,
    continued: str | None,
    structured_output: StructuredOutput | None,
) -> AnswerPlan:
    planned = functools.partial(
        plan_answer,
        engine.tokenizer,
        settings,
        prompt_token_ids,
        offer,
        template=template,
        continued=continued,
        structured_output=structured_output,
        max_bytes=engine.config.structured_output.max_bytes,
    )
    # A grammar spells schemas, which may be large.
    takes_long = (
        offer.choice == "required"
        or structured_output is not None
        or any(tool["function"].get("strict") for tool in offer.tools)
    )
    # The first plan of this kind tries the chat template out.
    tries_template = bool(offer.tools and prompt_token_ids) and template is None
    if takes_long or (tries_template and settings.calls_in_reasoning == "auto"):
        return await in_turn(planned)
    return planned()


def chat_names(request: ChatRequest) -> FieldNames:
    """The names by which `with_client_names` calls what is at fault."""
    names = FieldNames.of(request)
    if request.tool_choice not in (None, "none", "auto"):
        # What is at fault in a grammar of calls is a schema.
        names = names._replace(structured_output="tools")
    return names


def with_client_names(error: RequestError, names: FieldNames) -> RequestError:
    """The same error, with its field as this client named it."""
    if error.param == "prompt":
        error.param = "messages"
        error.message = _PROMPT.sub("messages", error.message)
    names.apply(error)
    return error
