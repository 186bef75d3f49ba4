"""The text the demo model is trained on and judged by: seeded, by grammar, pure standard library.

Every task is a function from a random generator to a `Case`: a prompt and the one right answer.
Which side of the split a case falls on depends on a hash of its `key` alone, never on how it was
drawn, so that nothing a model is judged by can be trained on, whatever the seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.append(str(Path(__file__).resolve().parent))

import demo_stories
from demo_case import Case, Message, ask, city_name, held_out, person
from demo_language import chat, echo, fact, lookup, lookup_marked, lookup_plain, make_json
from demo_numbers import add, compare, count, sort_numbers, sort_words, subtract, tally
from demo_tools import TOOLS, Tool, signature, tool_call_text
from demo_words import COLORS, FRUITS

__all__ = ["EXACT", "TASKS", "Case", "Message", "draw", "held_out"]


def recall(rng: random.Random) -> Case:
    """Remember over a few turns what the user said about themselves."""
    what = rng.choice(("name", "city", "color", "fruit"))
    if what == "name":
        value = person(rng)
        said, ok, question, answer = (
            f"My name is {value}.",
            f"Nice to meet you, {value}!",
            "What is my name?",
            f"Your name is {value}.",
        )
    elif what == "city":
        value = city_name(rng)
        said, ok, question, answer = (
            f"I live in {value}.",
            f"{value} is a nice city.",
            "Where do I live?",
            f"You live in {value}.",
        )
    else:
        value = rng.choice(COLORS if what == "color" else FRUITS)
        said, ok = f"My favorite {what} is {value}.", f"I will remember that you like {value}."
        question, answer = f"What is my favorite {what}?", f"Your favorite {what} is {value}."
    messages: list[Message] = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": ok},
    ]
    between = [draw(rng, rng.choice(SINGLE)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    for case in between:
        messages += [*case.messages, {"role": "assistant", "content": case.answer}]
    key = f"recall:{said} {' '.join(c.key for c in between)}"
    return Case("recall", key, [*messages, {"role": "user", "content": question}], answer)


def tool_call(rng: random.Random, tools: list[Tool] | None = None) -> Case:
    """Answer with a call of the one tool that the request is for, among one to three."""
    tools = tools or [t.drawn(rng) for t in rng.sample(TOOLS, rng.randint(1, 3))]
    tool = rng.choice(tools)
    request, arguments = tool.request(rng, {"city": city_name, "name": person})
    key = f"tool_call:{request} {[signature(t.schema()) for t in tools]}"
    answer = tool_call_text(tool.name, arguments)
    return Case(
        "tool_call",
        key,
        [{"role": "user", "content": request}],
        answer,
        [t.schema() for t in tools],
    )


def tool_result(rng: random.Random, tools: list[Tool] | None = None) -> Case:
    """Say in a sentence what a called tool gave back."""
    tools = tools or [t.drawn(rng) for t in rng.sample(TOOLS, rng.randint(1, 3))]
    tool = rng.choice(tools)
    request, arguments = tool.request(rng, {"city": city_name, "name": person})
    content, answer = tool.result(rng, arguments)
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": content},
    ]
    return Case(
        "tool_result",
        f"tool_result:{request} {content}",
        messages,
        answer,
        [t.schema() for t in tools],
    )


def story(rng: random.Random) -> Case:
    """A story on request: judged for coherence, not for an exact match."""
    drawn = demo_stories.draw(rng)
    return ask("story", drawn.text, drawn.request, drawn.text)


TASKS: dict[str, Callable[[random.Random], Case]] = {
    "add": add,
    "subtract": subtract,
    "compare": compare,
    "count": count,
    "tally": tally,
    "sort_numbers": sort_numbers,
    "sort_words": sort_words,
    "lookup": lookup,
    "json": make_json,
    "echo": echo,
    "fact": fact,
    "chat": chat,
    "recall": recall,
    "tool_call": tool_call,
    "tool_result": tool_result,
    "story": story,
    "lookup_plain": lookup_plain,
    "lookup_marked": lookup_marked,
}


SINGLE = ("add", "subtract", "compare", "echo", "fact", "fact", "chat")


EXACT = tuple(t for t in TASKS if t not in ("story", "lookup_plain", "lookup_marked"))


def draw(rng: random.Random, task: str, *, judged: bool = False) -> Case:
    """One case of a task from one side of the split."""
    while True:
        case = TASKS[task](rng)
        if held_out(case.key) == judged:
            return case
