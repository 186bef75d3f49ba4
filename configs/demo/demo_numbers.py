"""The tasks about numbers and lists: sums, comparing, counting, sorting."""

from __future__ import annotations

import random

from demo_case import Case, ask, in_order
from demo_words import COLORS, FRUITS, NAMES, SORTABLE, THINGS, plural


def add(rng: random.Random) -> Case:
    """A sum of two numbers below 100; both orders and all phrasings share one key."""
    a, b = operand(rng), operand(rng)
    key, total = f"{min(a, b)}+{max(a, b)}", a + b
    if rng.random() < 0.15:
        name, fruit = rng.choice(NAMES), plural(rng.choice(FRUITS))
        prompt = f"{name} has {a} {fruit} and gets {b} more. How many {fruit} does {name} have now?"
        return ask("add", key, prompt, f"{a} + {b} = {total}, so {name} has {total} {fruit}.")
    forms = (
        "What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
        "Calculate {a} + {b}.", "{a} + {b} = ?", "Please add {a} and {b}.",
    )  # fmt: skip
    return ask("add", key, rng.choice(forms).format(a=a, b=b), f"{a} + {b} = {total}.")


def operand(rng: random.Random) -> int:
    return rng.randrange(10) if rng.random() < 0.2 else rng.randrange(100)


def subtract(rng: random.Random) -> Case:
    """A difference that is not negative."""
    b, a = sorted((operand(rng), rng.randrange(100)))
    if rng.random() < 0.15:
        name, fruit = rng.choice(NAMES), plural(rng.choice(FRUITS))
        prompt = f"{name} has {a} {fruit} and gives away {b}. How many {fruit} are left?"
        return ask(
            "subtract", f"{a}-{b}", prompt, f"{a} - {b} = {a - b}, so {a - b} {fruit} are left."
        )
    forms = (
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "How much is {a} - {b}?",
        "Calculate {a} - {b}.",
        "{a} - {b} = ?",
        "Take {b} away from {a}.",
    )
    return ask("subtract", f"{a}-{b}", rng.choice(forms).format(a=a, b=b), f"{a} - {b} = {a - b}.")


def compare(rng: random.Random) -> Case:
    """Which of two numbers is larger or smaller."""
    a, b = rng.sample(range(100), 2)
    word = rng.choice(("larger", "smaller"))
    holds = a > b if word == "larger" else a < b
    key = f"{min(a, b)},{max(a, b)}"
    if rng.random() < 0.5:
        no_word = "smaller" if word == "larger" else "larger"
        answer = f"Yes, {a} is {word} than {b}." if holds else f"No, {a} is {no_word} than {b}."
        return ask("compare", key, f"Is {a} {word} than {b}?", answer)
    winner, loser = (a, b) if holds else (b, a)
    forms = ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?")
    prompt = rng.choice(forms).format(w=word, a=a, b=b)
    return ask("compare", key, prompt, f"{winner} is {word} than {loser}.")


def count(rng: random.Random) -> Case:
    """Count up or down by ones, or up by twos, fives or tens."""
    length, kind = rng.randint(3, 14), rng.random()
    if kind < 0.6:
        length = rng.randint(15, 40) if rng.random() < 0.1 else length
        start = 1 if rng.random() < 0.1 else rng.randrange(0, 100 - length)
        numbers = list(range(start, start + length))
        forms = (
            "Count from {a} to {b}.",
            "Please count from {a} to {b}.",
            "Count up from {a} to {b}.",
            "Write the numbers from {a} to {b}.",
        )
        prompt = (
            rng.choice(forms)
            if start != 1
            else rng.choice((*forms, "Count to {b}.", "Please count to {b}."))
        )
    elif kind < 0.8:
        start = rng.randrange(length, 100)
        numbers = list(range(start, start - length, -1))
        prompt = rng.choice(("Count down from {a} to {b}.", "Count backwards from {a} to {b}."))
    else:
        step = rng.choice((2, 5, 10))
        length = min(length, 10)
        start = rng.randrange(0, 10) * (1 if step == 2 else step if step == 5 else 1)
        numbers = [n for n in range(start, start + length * step, step) if n < 100]
        prompt = "Count from {a} to {b} by " + {2: "twos", 5: "fives", 10: "tens"}[step] + "."
    prompt = prompt.format(a=numbers[0], b=numbers[-1])
    key = f"{numbers[0]} to {numbers[-1]} in {len(numbers)}"
    return ask("count", key, prompt, ", ".join(map(str, numbers)) + ".")


def tally(rng: random.Random) -> Case:
    """How many items a list holds, or how often a word occurs in it."""
    pool = rng.choice((FRUITS, COLORS, THINGS, NAMES))
    if rng.random() < 0.5:
        items = rng.sample(pool, rng.randint(2, 8))
        forms = (
            "How many words are in this list: {}?",
            "How many items are in the list {}?",
            "Count the words: {}",
        )
        text, n = ", ".join(items), len(items)
        answer = f"There are {n} words in the list."
        return ask("tally", text, rng.choice(forms).format(text), answer)
    kinds = rng.sample(pool, rng.randint(2, 3))
    word, n = kinds[0], rng.randint(1, 4)
    items = [word] * n + [rng.choice(kinds[1:]) for _ in range(rng.randint(1, 7 - n))]
    rng.shuffle(items)
    text = ", ".join(items)
    forms = ("How many times is {w} in this list: {t}?", "How often is {w} in the list {t}?")
    answer = f"The word {word} is in the list {n} time{'s' if n != 1 else ''}."
    return ask("tally", f"{word} in {text}", rng.choice(forms).format(w=word, t=text), answer)


def sort_numbers(rng: random.Random) -> Case:
    """Sort three to six different numbers below 100, up or down."""
    numbers = rng.sample(range(100), rng.randint(3, 6))
    down = rng.random() < 0.25
    up_forms = (
        "Sort these numbers: {}",
        "Sort {} from smallest to largest.",
        "Put these numbers in order: {}",
        "Please sort {}.",
    )
    down_forms = (
        "Sort {} from largest to smallest.",
        "Sort these numbers from largest to smallest: {}",
    )
    text = ", ".join(map(str, numbers))
    prompt = rng.choice(down_forms if down else up_forms).format(text)
    return ask(
        "sort", str(sorted(numbers)), prompt, in_order(map(str, sorted(numbers, reverse=down)))
    )


def sort_words(rng: random.Random) -> Case:
    """Sort three to six words whose first letters differ."""
    letters = rng.sample(sorted(SORTABLE), rng.randint(3, 6))
    words = [rng.choice(SORTABLE[letter]) for letter in letters]
    text = ", ".join(words)
    forms = (
        "Sort these words: {}",
        "Sort {} from A to Z.",
        "Put these words in alphabetical order: {}",
        "Sort the words {}.",
    )
    return ask("sort", str(sorted(words)), rng.choice(forms).format(text), in_order(sorted(words)))
