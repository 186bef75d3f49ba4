"""The tools that the demo model learns to call, with their requests, results and spoken answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from demo_words import SONGS, THINGS, WEATHERS

Drawers = Mapping[str, Callable[[random.Random], str]]


@dataclass(frozen=True)
class Tool:
    """A tool: its parameters as (kind, name), and the ways to ask for it.

    The kind says how a value is drawn, the name is what the schema calls it; names vary, so that
    the model reads them in the prompt instead of knowing them by heart.
    """

    name: str
    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[str, tuple[str, ...]], ...]
    requests: tuple[str, ...]

    def drawn(self, rng: random.Random) -> Tool:
        """The same tool under one of its names, each parameter under one of its names."""
        parameters = tuple((kind, (rng.choice(names),)) for kind, names in self.parameters)
        return replace(self, name=rng.choice(self.names), parameters=parameters)

    def schema(self) -> dict[str, Any]:
        """The tool in the form that an OpenAI client sends."""
        types = {
            kind: "integer" if kind in ("a", "b", "hour") else "string"
            for kind, _ in self.parameters
        }
        properties = {names[0]: {"type": types[kind]} for kind, names in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def request(self, rng: random.Random, drawers: Drawers) -> tuple[str, dict[str, Any]]:
        """A request in words, and the arguments that it asks for."""
        values: dict[str, Any] = {kind: _value(rng, kind, drawers) for kind, _ in self.parameters}
        arguments = {names[0]: values[kind] for kind, names in self.parameters}
        return rng.choice(self.requests).format(**values), arguments

    def result(self, rng: random.Random, arguments: dict[str, Any]) -> tuple[str, str]:
        """What the tool gives back (as JSON or as plain text) and the sentence that says it."""
        values = dict(zip((kind for kind, _ in self.parameters), arguments.values(), strict=True))
        as_json = rng.random() < 0.6
        base = self.names[0]
        if base == "get_weather":
            weather, degrees = rng.choice(WEATHERS), rng.randint(0, 39)
            found = {"weather": weather, "temperature": degrees}
            content = json.dumps(found) if as_json else f"{weather}, {degrees} degrees"
            return content, f"It is {weather} in {values['city']} with {degrees} degrees."
        if base == "get_time":
            time = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
            return json.dumps(
                {"time": time}
            ) if as_json else time, f"It is {time} in {values['city']}."
        if base in ("add", "multiply"):
            n = values["a"] + values["b"] if base == "add" else values["a"] * values["b"]
            return json.dumps({"result": n}) if as_json else str(n), f"The result is {n}."
        done = {
            "send_message": f"I sent the message to {values.get('name')}.",
            "play_song": f"Now playing {values.get('song')}.",
            "set_alarm": f"The alarm is set for {values.get('hour')} o'clock.",
            "search": f"I searched for {values.get('thing')}.",
        }[base]
        return json.dumps({"status": "ok"}) if as_json else "ok", done


def _value(rng: random.Random, kind: str, drawers: Drawers) -> Any:
    if kind in ("a", "b"):
        return rng.randint(100, 999)
    if kind == "hour":
        return rng.randint(1, 23)
    if kind in drawers:
        return drawers[kind](rng)
    if kind == "song":
        return rng.choice(SONGS)
    words = rng.sample(THINGS, rng.randint(1, 3))
    return " ".join(words)


CITY = ("city", ("city", "city", "location", "place"))
TOOLS: tuple[Tool, ...] = (
    Tool(
        "",
        ("get_weather", "get_weather", "get_weather", "weather", "get_current_weather"),
        "Get the weather in a city.",
        (CITY,),
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Tell me the weather in {city}.",
            "What is the weather like in {city}?",
            "How is the weather in {city} today?",
            "Is it sunny in {city}?",
            "Weather in {city}, please.",
        ),
    ),
    Tool(
        "",
        ("get_time", "get_time", "time_in", "get_current_time"),
        "Get the time in a city.",
        (CITY,),
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "What is the time in {city}?",
        ),
    ),
    Tool(
        "",
        ("add", "add", "add_numbers", "sum"),
        "Add two numbers.",
        (("a", ("a", "a", "x")), ("b", ("b", "b", "y"))),
        (
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "What is {a} plus {b}?",
            "Use the tool to add {a} and {b}.",
        ),
    ),
    Tool(
        "",
        ("multiply", "multiply", "product"),
        "Multiply two numbers.",
        (("a", ("a", "a", "x")), ("b", ("b", "b", "y"))),
        ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?"),
    ),
    Tool(
        "",
        ("send_message", "send_message", "send"),
        "Send a message to a person.",
        (("name", ("to", "name", "person")), ("text", ("text", "message"))),
        (
            "Send {name} the message: {text}",
            "Send a message to {name}: {text}",
            "Tell {name}: {text}",
        ),
    ),
    Tool(
        "",
        ("play_song", "play_song", "play_music", "play"),
        "Play a song.",
        (("song", ("title", "song", "name")),),
        ("Play {song}.", "Please play the song {song}.", "I want to hear {song}."),
    ),
    Tool(
        "",
        ("set_alarm", "set_alarm", "alarm"),
        "Set an alarm.",
        (("hour", ("hour", "time")),),
        (
            "Set an alarm for {hour} o'clock.",
            "Wake me up at {hour} o'clock.",
            "Please set the alarm to {hour}.",
        ),
    ),
    Tool(
        "",
        ("search", "search", "web_search", "find"),
        "Search for something.",
        (("thing", ("query", "text", "q")),),
        (
            "Search for {thing}.",
            "Find {thing}.",
            "Please look for {thing}.",
            "Can you search for {thing}?",
        ),
    ),
)


def signature(schema: Mapping[str, Any]) -> str:
    """How the chat template shows a tool: short, as each prompt token costs training time."""
    function = schema.get("function", schema)
    properties = (function.get("parameters") or {}).get("properties") or {}
    shown = ", ".join(f"{name}: {spec.get('type', 'any')}" for name, spec in properties.items())
    described = f" - {function['description']}" if function.get("description") else ""
    return f"{function['name']}({shown}){described}"


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the Hermes form, as an answer holds it."""
    call = {"name": name, "arguments": dict(arguments)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
