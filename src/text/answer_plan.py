"""How the answer to one request is made and read: what the sampler is told, and which parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from src.core.config import ChatSection
from src.core.structured_output import StructuredOutput
from src.core.thinking import Thinking
from src.text.answer import AnswerParser, PlainAnswer, ToolOffer
from src.text.answer_grammar import answer_form
from src.text.reasoning import ReasoningParser, ReasoningSyntax
from src.text.thought_calls import ThoughtCalls, leaves_thinking_open
from src.text.tool_calls.detection import reasoning_syntax, tool_call_syntax
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.syntaxes import SYNTAXES
from src.text.tool_calls.typed_values import Kinds, kinds_of_arguments

if TYPE_CHECKING:
    from src.text.tokenizer import Tokenizer

# Tokens of a prompt that are looked at: at its end, and of a message that is to be continued.
_END_TOKENS = 32
_CONTINUED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """What follows from a model, its settings and a request.

    Attributes
    ----------
    structured_output
        For ``SamplingParams.structured_output``.
    kept_special_token_ids
        For ``SamplingParams.kept_special_token_ids``: tags that the parser must see.
    forces_calls
        Whether ``structured_output`` is a grammar of calls.
    functions, parallel, calls
        The names of the tools with the kinds of their arguments, whether an answer may have several
        calls, and how they are written; ``None`` where calls are not read.
    eager, certain
        Whether arguments are shown as they come; whether an opening tag surely begins a call.
    reasoning, reasoning_is_open
        How reasoning is marked, ``None`` where there can be none; whether the prompt has opened it.
    calls_in_reasoning
        Whether a call in reasoning that never ends is a call.
    """

    structured_output: StructuredOutput | None
    kept_special_token_ids: tuple[int, ...]
    forces_calls: bool
    functions: Mapping[str, Mapping[str, Kinds]]
    parallel: bool
    calls: Syntax | None
    eager: bool
    certain: bool
    reasoning: ReasoningSyntax | None
    reasoning_is_open: bool
    calls_in_reasoning: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether answers are text and nothing else."""
        return self.calls is None and self.reasoning is None

    def thinking(self, budget: int | None = None) -> Thinking | None:
        """For ``SamplingParams.thinking``; ``None`` where answers have no reasoning."""
        if self.reasoning is None:
            return None
        return self.reasoning.thinking(is_open=self.reasoning_is_open, budget=budget)

    def parser(self) -> AnswerParser:
        """A fresh parser, for one choice."""
        parser: AnswerParser = PlainAnswer()
        if self.calls is not None:
            parser = ToolCallParser(
                self.calls,
                self.functions,
                parallel=self.parallel,
                eager=self.eager,
                certain=self.certain,
                alone=self.forces_calls,
            )
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning, parser, is_open=self.reasoning_is_open)
        thinking = self.thinking()
        if self.calls_in_reasoning and self.calls is not None and thinking is not None:
            # Only what is marked as a call, and whole.
            marked = replace(self.calls, starts=(), siblings=())
            calls = ToolCallParser(marked, self.functions, parallel=self.parallel)
            parser = ThoughtCalls(parser, calls, thinking)
        return parser


def reasoning_of(
    tokenizer: Tokenizer, settings: ChatSection, template: str | None = None
) -> ReasoningSyntax | None:
    """Return how reasoning is marked; `plan_answer` needs no prompt where it is not.

    ``template`` is the one that stands in for the model's own.
    """
    return reasoning_syntax(settings.reasoning_parser, _source(tokenizer, template))


def plan_answer(
    tokenizer: Tokenizer,
    settings: ChatSection,
    prompt_token_ids: Sequence[int],
    offer: ToolOffer,
    *,
    template: str | None = None,
    continued: str | None = None,
    structured_output: StructuredOutput | None = None,
    max_bytes: int | None = None,
) -> AnswerPlan:
    """Return the plan for the answer to a chat.

    Parameters
    ----------
    tokenizer
        The model's, whose chat template tells how the model writes calls and reasoning.
    prompt_token_ids
        The whole rendered prompt: templates may open the reasoning at its end.
    offer
        The request's tools.
    template
        The chat template that stands in for the model's own.
    continued
        The text of the prompt's last message, if that is left open.
    structured_output
        What the request itself asks of the answer's text.
    max_bytes
        What the parameters of functions may have in all, where a grammar is made of them.

    Raises
    ------
    InvalidRequestError
        A grammar is made of functions whose parameters are no objects, or are too large.
    """
    source = _source(tokenizer, template)
    offers = bool(offer.tools) and offer.choice != "none"
    forces_calls = offers and offer.choice == "required"
    calls = tool_call_syntax(settings.tool_call_parser, source) if offers else None
    if calls is None and forces_calls:
        calls = SYNTAXES["json"]
    reasoning = reasoning_syntax(settings.reasoning_parser, source)
    stage = "closed"
    if reasoning is not None:
        end = prompt_token_ids[-(_END_TOKENS if continued is None else _CONTINUED_TOKENS) :]
        stage = reasoning.stage(tokenizer.decode(end, False), continued=continued)
    if (
        stage == "open"
        and not forces_calls
        and structured_output is not None
        and structured_output.kind == "grammar"
    ):
        # It cannot be made a part of another grammar: it holds from the first character, which is
        # therefore none of the reasoning that the prompt has opened.
        stage = "closed"
    if stage == "closed":
        reasoning = None

    def special(tag: str) -> int | None:
        token_id = tokenizer.token_to_id(tag)
        return token_id if token_id in tokenizer.special_ids else None

    form = answer_form(special, structured_output, calls, offer, reasoning, stage, max_bytes)
    if form.calls is not None:
        calls = form.calls.syntax
    tags = dict.fromkeys(
        tag for syntax in (calls, reasoning) if syntax is not None for tag in syntax.tags
    )
    return AnswerPlan(
        structured_output=form.output,
        kept_special_token_ids=tuple(i for i in map(special, tags) if i is not None),
        forces_calls=forces_calls,
        # Without the schemas, which may be large: an answer is read for as long as it takes.
        functions=_functions(offer, calls),
        parallel=offer.parallel,
        calls=calls,
        eager=form.calls is not None or settings.stream_tool_arguments,
        certain=form.calls is not None,
        reasoning=reasoning,
        reasoning_is_open=stage == "open",
        # Under a grammar thinking ends where the grammar says.
        calls_in_reasoning=form.output is None
        and _calls_in_reasoning(tokenizer, settings, template, calls, reasoning),
    )


def _calls_in_reasoning(
    tokenizer: Tokenizer,
    settings: ChatSection,
    template: str | None,
    calls: Syntax | None,
    reasoning: ReasoningSyntax | None,
) -> bool:
    setting = settings.calls_in_reasoning
    if calls is None or not calls.openings or reasoning is None or setting == "off":
        return False
    if setting == "on":
        return True
    # A request's own template is not tried out.
    return (
        template is None
        and tokenizer.has_chat_template
        and leaves_thinking_open(
            tokenizer.chat_template, reasoning.opening, reasoning.closing, calls.openings[0]
        )
    )


def _functions(offer: ToolOffer, calls: Syntax | None) -> dict[str, Mapping[str, Kinds]]:
    """Return the functions that may be called, with the types that their syntax needs."""
    functions = [tool["function"] for tool in offer.tools]
    if calls is None or not calls.is_typed:
        return {function["name"]: {} for function in functions}
    return {
        function["name"]: kinds_of_arguments(function.get("parameters") or {})
        for function in functions
    }


def _source(tokenizer: Tokenizer, template: str | None) -> str:
    if template is not None or not tokenizer.has_chat_template:
        return template or ""
    return "\n".join(tokenizer.chat_template.sources.values())
