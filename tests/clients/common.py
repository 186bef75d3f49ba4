"""What the clients' tests share: where the server is, and what the bundled model can answer."""

from __future__ import annotations

import os
from typing import Any

# Set by the session; the address of a server of the bundled model, without /v1.
URL = os.environ["CLIENTS_SERVER"]
BASE_URL = f"{URL}/v1"
# Of a small encoder with random weights.
ENCODER_URL = os.environ.get("CLIENTS_ENCODER", "")
ENCODER = "encoder"
MODEL = "demo"
KEY = "none"

# Questions whose greedy answers are known: the model was trained on their kind.
SUM = "How much is 90 + 66?"
SUM_ANSWER = "90 + 66 = 156."
FACT = "Please: What is a baby dog called?"
FACT_ANSWER = "A baby dog is called a puppy."
WEATHER = "What is the weather in Paris?"
ADD = "Use the tool to add 123 and 456."
STORY = "Once upon a time"
PERSON = "Write a JSON object with the keys name and price. The name is Rosa. The price is 27."


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def parameters(**types: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in types.items()},
        "required": list(types),
        "additionalProperties": False,
    }


def tool(name: str, description: str, **types: str) -> dict[str, Any]:
    """A function as chat completions take it."""
    described = {"name": name, "description": description, "parameters": parameters(**types)}
    return {"type": "function", "function": described}


GET_WEATHER = tool("get_weather", "Get the weather in a city.", city="string")
ADD_NUMBERS = tool("add", "Add two numbers.", a="integer", b="integer")
