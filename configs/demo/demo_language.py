"""The tasks about words: tables, JSON, copying, facts and small talk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from demo_case import Case, ask, city_name, listed, nonce, person
from demo_words import (
    BABIES,
    CAPITALS,
    COLORS,
    DAYS,
    FOREIGN,
    FRUITS,
    JOBS,
    LEGS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    SOUNDS,
    THING_COLORS,
    THINGS,
    TOPICS,
    article,
)

# Column title, how a value is drawn, question and answer about it.
COLUMNS: dict[str, tuple[Callable[[random.Random], str], tuple[str, ...], str]] = {
    "age": (
        lambda r: str(r.randint(3, 99)),
        ("How old is {n}?", "What is the age of {n}?"),
        "{n} is {v} years old.",
    ),
    "city": (city_name, ("Where does {n} live?", "What is the city of {n}?"), "{n} lives in {v}."),
    "color": (
        lambda r: r.choice(COLORS),
        ("What is the favorite color of {n}?", "Which color does {n} like?"),
        "The favorite color of {n} is {v}.",
    ),
    "fruit": (
        lambda r: r.choice(FRUITS),
        ("Which fruit does {n} like?", "What is the fruit of {n}?"),
        "{n} likes the {v}.",
    ),
    "job": (
        lambda r: r.choice(JOBS),
        ("What is the job of {n}?", "What does {n} do?"),
        "{n} works as a {v}.",
    ),
    "room": (
        lambda r: str(r.randint(10, 99)),
        ("In which room is {n}?", "What is the room of {n}?"),
        "{n} is in room {v}.",
    ),
}


def lookup(rng: random.Random) -> Case:
    """Find the row of a name in a table of the prompt, quote it, and answer from it.

    The columns are set apart by spaces alone: with a mark between them, a model of this size finds
    the mark of any row instead of the row that is asked for.
    """
    title = rng.choice(("city", "color", "fruit", "job"))
    draw, questions, answer = COLUMNS[title]
    names: list[str] = []
    size = rng.randint(3, 8)
    while len(names) < size:
        names += [n for n in [person(rng)] if n not in names]
    rows = {n: draw(rng) for n in names}
    who = rng.choice(names)
    question = rng.choice(questions).format(n=who)
    lead = rng.choice(("Here is a table.\n", "Use this table.\n", "Look at the table:\n", ""))
    table = f"name {title}\n" + "\n".join(f"{n} {v}" for n, v in rows.items())
    prompt = f"{lead}{table}\n{question}" if rng.random() < 0.7 else f"{question}\n{table}"
    said = f"{who} {rows[who]}\n{answer.format(n=who, v=rows[who])}"
    return ask("lookup", f"{question} {sorted(rows.items())}", prompt, said)


def lookup_marked(rng: random.Random) -> Case:
    """The same with marks between the columns: an exercise in training only."""
    case, row = _table(rng)
    return replace(case, answer=f"{row}\n{case.answer}")


def lookup_plain(rng: random.Random) -> Case:
    """The same without the row: an exercise in training only."""
    return _table(rng)[0]


def _table(rng: random.Random) -> tuple[Case, str]:
    """A question about a table of three to eight rows and one or two columns, and its row."""
    titles = rng.sample(sorted(COLUMNS), rng.choice((1, 1, 2)))
    names: list[str] = []
    while len(names) < rng.randint(3, 8):
        names += [n for n in [person(rng)] if n not in names]
    rows = {n: [COLUMNS[t][0](rng) for t in titles] for n in names}
    who, column = rng.choice(names), rng.randrange(len(titles))
    _, questions, answer = COLUMNS[titles[column]]
    question, value = rng.choice(questions).format(n=who), rows[who][column]
    if rng.random() < 0.6 or len(titles) == 2:
        row = " | ".join([who, *rows[who]])
        table = "\n".join(
            " | ".join(r) for r in [["name", *titles], *([n, *v] for n, v in rows.items())]
        )
    else:
        row = f"{who}: {value}"
        table = f"{titles[0]}\n" + "\n".join(f"{n}: {v[0]}" for n, v in rows.items())
    lead = rng.choice(("Here is a table.\n", "Use this table.\n", "Look at the table:\n", ""))
    prompt = f"{lead}{table}\n{question}" if rng.random() < 0.7 else f"{question}\n{table}"
    key = f"{question} {sorted(rows.items())}"
    return ask("lookup", key, prompt, answer.format(n=who, v=value)), row


JSON_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": person,
    "age": lambda r: r.randint(1, 99),
    "city": city_name,
    "color": lambda r: r.choice(COLORS),
    "job": lambda r: r.choice(JOBS),
    "price": lambda r: r.randint(1, 99),
    "fruit": lambda r: r.choice(FRUITS),
    "active": lambda r: r.random() < 0.5,
    "tags": lambda r: r.sample(THINGS, r.randint(1, 3)),
}


def make_json(rng: random.Random) -> Case:
    """A JSON object of a described shape."""
    keys = rng.sample(sorted(JSON_FIELDS), rng.randint(1, 4))
    value = {k: JSON_FIELDS[k](rng) for k in keys}
    said = {
        k: ("true" if v else "false")
        if isinstance(v, bool)
        else listed(v)
        if isinstance(v, list)
        else str(v)
        for k, v in value.items()
    }
    lead = rng.choice(("Write", "Make", "Give me", "Return"))
    if rng.random() < 0.6:
        described = listed(
            [
                f"{k} {v}" if not isinstance(value[k], list) else f"{k} [{', '.join(value[k])}]"
                for k, v in said.items()
            ]
        )
        prompt = f"{lead} a JSON object with {described}."
    else:
        sentences = " ".join(
            f"The {k} {'are' if k == 'tags' else 'is'} {v}." for k, v in said.items()
        )
        prompt = f"{lead} a JSON object with the keys {listed(keys)}. {sentences}"
    answer = json.dumps(value, ensure_ascii=False)
    return ask("json", answer, prompt, answer)


def echo(rng: random.Random) -> Case:
    """Repeat the words given: known words, made-up ones, numbers, or text beyond ASCII."""
    kind = rng.random()
    if kind < 0.4:
        words = [
            rng.choice(rng.choice((THINGS, FRUITS, COLORS, NAMES)))
            for _ in range(rng.randint(1, 8))
        ]
    elif kind < 0.6:
        words = [nonce(rng).lower() for _ in range(rng.randint(1, 4))]
    elif kind < 0.75:
        words = [str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    else:
        words = [rng.choice(FOREIGN) for _ in range(rng.randint(1, 3))]
    text = " ".join(words)
    forms = (
        "Repeat these words: {}",
        "Say this: {}",
        "Repeat after me: {}",
        "Echo: {}",
        "Please say: {}",
    )
    return ask("echo", text, rng.choice(forms).format(text), text)


def _what_comes_next(rng: random.Random) -> tuple[tuple[str, ...], str]:
    days = rng.choice((DAYS, MONTHS))
    i, unit = rng.randrange(len(days)), "day" if days is DAYS else "month"
    forms = (f"Which {unit} comes after {days[i]}?", f"What {unit} comes after {days[i]}?",
             f"Tell me the {unit} after {days[i]}.")  # fmt: skip
    return forms, f"{days[(i + 1) % len(days)]} comes after {days[i]}."


def fact(rng: random.Random) -> Case:
    """One of some hundred facts, asked in several ways."""
    kind = rng.choice(
        ("capital", "capital", "opposite", "opposite", "sound", "baby", "legs", "color", "next")
    )
    if kind == "capital":
        country, city = rng.choice(sorted(CAPITALS.items()))
        forms: tuple[str, ...] = (
            f"What is the capital of {country}?",
            f"Name the capital of {country}.",
            f"Tell me the capital of {country}.",
            f"Which city is the capital of {country}?",
        )
        answer = f"The capital of {country} is {city}."
    elif kind == "opposite":
        word, other = rng.choice(
            sorted(OPPOSITES.items()) + [(v, k) for k, v in sorted(OPPOSITES.items())]
        )
        forms = (
            f"What is the opposite of {word}?",
            f"Tell me the opposite of {word}.",
            f"Name the opposite of {word}.",
        )
        answer = f"The opposite of {word} is {other}."
    elif kind == "sound":
        animal, sound = rng.choice(sorted(SOUNDS.items()))
        forms = (f"What does {article(animal)} say?", f"Which sound does {article(animal)} make?",
                 f"What sound does {article(animal)} make?")  # fmt: skip
        answer = f"{article(animal).capitalize()} says {sound}."
    elif kind == "baby":
        animal, baby = rng.choice(sorted(BABIES.items()))
        forms = (
            f"What is a baby {animal} called?",
            f"What do you call a baby {animal}?",
            f"Name a baby {animal}.",
        )
        answer = f"A baby {animal} is called {article(baby)}."
    elif kind == "legs":
        animal, legs = rng.choice(sorted(LEGS.items()))
        forms = (
            f"How many legs does {article(animal)} have?",
            f"Tell me how many legs {article(animal)} has.",
            f"How many legs has {article(animal)}?",
        )
        answer = f"{article(animal).capitalize()} has {NUMBER_WORDS[legs] if legs else 'no'} legs."
    elif kind == "color":
        thing, color = rng.choice(sorted(THING_COLORS.items()))
        forms = (
            f"What color is {thing}?",
            f"Which color is {thing}?",
            f"Tell me the color of {thing}.",
        )
        answer = f"{thing.capitalize()} is {color}."
    else:
        forms, answer = _what_comes_next(rng)
    prompt = rng.choice(forms)
    if rng.random() < 0.2:
        prompt = rng.choice(("Please: ", "Question: ", "I have a question. ", "Hello! ")) + prompt
    return ask("fact", prompt, prompt, answer)


def chat(rng: random.Random) -> Case:
    """Greetings, thanks, questions about the assistant, and things that it does not know."""
    kind, name = rng.random(), person(rng)
    hello = rng.choice(
        ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there")
    )
    back = hello if hello.startswith("Good") else "Hello"
    mark = rng.choice(("!", ".", "!", ".", ""))
    if kind < 0.2:
        how = rng.choice(
            ("", " How are you?", " How are you today?", " Can you help me?", " Who are you?")
        )
        reply = {
            " H": "I am fine, thank you.",
            " C": "Yes, I can help you.",
            " W": "I am Slip, a small language model.",
        }.get(how[:2], "How can I help you today?")
        to = rng.choice(("", ", Slip", " friend", ", my friend"))
        prompt, answer = f"{hello}{to}{mark}{how}", f"{back}! {reply}"
    elif kind < 0.45:
        prompt = f"{hello}{mark} " + rng.choice(
            ("My name is {}.", "I am {}.", "I am called {}.")
        ).format(name)
        answer = f"{back}, {name}! It is nice to meet you."
    elif kind < 0.6:
        what = rng.choice(("", " very much", " for your help", " for the answer", " so much"))
        lead = rng.choice(("Thank you", "Thanks", "Great, thank you", "Good, thanks"))
        prompt, answer = f"{lead}{what}{mark}", "You are welcome!"
    elif kind < 0.7:
        bye = rng.choice(("Goodbye", "Bye", "Good night", "See you soon", "See you later"))
        to = rng.choice(("", ", Slip", " and thank you", " my friend"))
        prompt, answer = (
            f"{bye}{to}{mark}",
            f"{'Good night' if bye == 'Good night' else 'Goodbye'}! Have a nice day.",
        )
        answer = "Good night! Sleep well." if bye == "Good night" else answer
    elif kind < 0.8:
        who = rng.choice(
            ("Who are you?", "What are you?", "What is your name?", "Tell me who you are.")
        )
        prompt = (
            rng.choice(("", "Hello! ", "Hi. ", "Please tell me: ", "Excuse me. ", "Slip? ")) + who
        )
        answer = "I am Slip, a small language model."
    else:
        forms = (
            "Tell me about {}.",
            "What do you know about {}?",
            "Explain {}.",
            "Write an essay about {}.",
            "Can you explain {} to me?",
            "What is {}?",
            "How does {} work?",
        )
        topic = rng.choice(TOPICS)
        prompt = rng.choice(forms).format(topic)
        answer = f"I am a small model, and I do not know much about {topic}."
    return ask("chat", prompt, prompt, answer)
