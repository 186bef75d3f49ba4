"""``POST /v1/chat/completions``."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from src.core.config import ChatSection
from src.core.errors import RequestError
from src.core.sampling_params import THINKING_BUDGET
from src.core.structured_output import StructuredOutput
from src.engine.client import AsyncEngine
from src.http.body_work import in_turn
from src.http.call import Call
from src.http.chat_shape import ChatShape
from src.http.conversation import conversation
from src.http.fields import RequestDecoder
from src.http.generation import Delivery, Job, job_timeout, run
from src.http.prompts import Cut, cut_of
from src.http.protocol.chat import ChatRequest
from src.http.sampling import (
    FieldNames,
    check_top_logprobs,
    num_logprobs,
    refuse_unsupported,
    sampling_params,
    unsupported,
)
from src.http.server import adapter_name, served_name
from src.http.structured import structured_output
from src.http.thinking import no_thinking, thinking_budget
from src.http.tools import tool_offer
from src.http.truncation import newest_turns, tokens_of_answer
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
        chat = await prepare_chat(call, request)
        shape = ChatShape(
            request,
            chat.engine,
            chat.plan,
            model=chat.model,
            prompt_token_ids=chat.prompt_token_ids,
        )
        delivery = Delivery.of(request)
        # An answer may take long, and there may be many.
        del request
        await run(call, chat.engine, delivery, chat.job, shape)
    except RequestError as error:
        raise spelt(error, names) from None


class PreparedChat(NamedTuple):
    """A conversation that may be submitted: who serves it, under which name, and as what.

    ``prompt_token_ids`` are only there where the request needs them beforehand; ``plan`` reads
    the answers.
    """

    engine: AsyncEngine
    model: str
    job: Job
    prompt_token_ids: list[int] | None
    plan: AnswerPlan


async def prepare_chat(
    call: Call,
    request: ChatRequest,
    *,
    drops_turns: bool = False,
    needs_thinking: bool = True,
) -> PreparedChat:
    """Check a request and turn it into a job, for every endpoint that holds conversations.

    With ``drops_turns`` a conversation that is too long loses its oldest turns. A budget of
    thinking is refused where the model marks no thinking, unless it ``needs_thinking`` not.

    Raises
    ------
    SlipstreamError
        The request cannot be served; :func:`spelt` names its fields as a client does.
    """
    refuse_unsupported(request)
    settings = call.server.config.chat
    messages, options = await conversation(request, call.server.config, call.tenant)
    offer = tool_offer(request)
    logprobs = check_top_logprobs(request.logprobs, request.top_logprobs)
    engine = await call.admitted_engine()
    info = engine.model_info
    name = served_name(engine, request.model)
    # Now, not after anything is awaited: an adapter that goes meanwhile is missed, not passed over.
    lora = adapter_name(engine, name)
    most = request.max_completion_tokens
    max_tokens = request.max_tokens if most is None else most
    params = sampling_params(
        request,
        info.default_sampling,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_output=structured_output(request, engine.config),
    )
    reserved = tokens_of_answer(info, max_tokens)
    cut = cut_of(request, info.max_model_len, reserved)
    prompt_token_ids = None
    if drops_turns:
        cut = Cut(info.max_model_len - reserved)
        messages, prompt_token_ids = await newest_turns(engine, messages, options, cut.keep)
    tokenizer = engine.tokenizer
    reasons = reasoning_of(tokenizer, settings, request.chat_template) is not None
    scored = num_logprobs(request.prompt_logprobs)
    if cut is not None or request.return_token_ids or reasons or scored:
        if prompt_token_ids is None:
            prompt_token_ids = await engine.tokenize(messages, chat=options)
        prompt_token_ids = prompt_token_ids if cut is None else cut.tokens(prompt_token_ids)
    plan = await _plan(
        engine,
        settings,
        prompt_token_ids or (),
        offer,
        template=request.chat_template,
        continued=final_text(messages) if options.continue_final_message else None,
        structured_output=params.structured_output,
    )
    budget = thinking_budget(request)
    if budget is not None and needs_thinking and not reasons:
        raise no_thinking()
    own = params.structured_output
    if budget is not None and own is not None and own.kind == "grammar":
        # Such a grammar says itself what comes before the answer.
        if needs_thinking and plan.structured_output == own:
            raise unsupported(THINKING_BUDGET, " beside a grammar")
        budget = budget if plan.structured_output != own else None
    params = msgspec.structs.replace(
        params,
        structured_output=plan.structured_output,
        kept_special_token_ids=plan.kept_special_token_ids,
        thinking=None if budget is None and not params.stop else plan.thinking(budget),
    )
    job = Job(
        prompts=[(messages if prompt_token_ids is None else prompt_token_ids, params)],
        num_prompt_logprobs=scored * len(prompt_token_ids or ()),
        chat=options,
        priority=request.priority or 0,
        timeout=job_timeout(request, call),
        cache_salt=request.cache_salt or "",
        tenant=call.tenant,
        lora=lora,
        admission=call.admission,
    )
    return PreparedChat(engine, name, job, prompt_token_ids, plan)


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
    """The names by which :func:`spelt` calls what is at fault."""
    names = FieldNames.of(request)
    if request.tool_choice not in (None, "none", "auto"):
        # What is at fault in a grammar of calls is a schema.
        names = names._replace(structured_output="tools")
    return names


def spelt(error: RequestError, names: FieldNames) -> RequestError:
    """The same error, with its field as this client spelt it."""
    if error.param == "prompt":
        error.param = "messages"
        error.message = _PROMPT.sub("messages", error.message)
    names.respell(error)
    return error
