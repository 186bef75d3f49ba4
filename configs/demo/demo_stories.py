"""The story grammar: short tales whose hero, place and thing stay the same from start to end.

A story is drawn in two steps: a cast (who, where, what) and one of several plots that speak about
that cast only. That makes the text coherent by construction, which is what the model has to learn.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from demo_words import ANIMALS, BOYS, COLORS, GIRLS, THINGS, article, plural

PLACES = [
    "a quiet forest", "a small village", "a green valley", "an old castle", "a little house",
    "a sunny meadow", "a big garden", "a deep cave",
]  # fmt: skip
SPOTS = [
    "the river", "the old oak", "the hill", "the lake", "the bridge", "the mill", "the road",
    "the barn",
]  # fmt: skip
TRAITS = ["little", "clever", "brave", "kind", "curious", "shy", "happy", "lazy", "gentle", "young"]
FRIEND_WORDS = ["friend", "neighbor", "cousin"]

PLOTS: tuple[str, ...] = (
    "One day, {name} lost {his} {color} {thing}. {name} looked near {spot}, but it was not "
    "there. {He} asked {article_friend} named {other} for help. Together they found the "
    "{thing} under {spot2}. {name} thanked {other} and smiled.",
    "One morning, {name} found {article_color} {thing} near {spot}. {name} wanted to know who"
    " had lost it. {He} walked to {spot2} and met {article_friend} named {other}. The {thing}"
    " belonged to {other}. {other} was very glad and gave {name} a sweet cake.",
    "One night, a big storm came. The wind was loud and {name} was afraid. {He} ran to {spot}"
    " and met {article_friend} named {other}. They told each other jokes until the rain "
    "stopped. In the morning, the sun was shining again.",
    "{name} wanted to build a house near {spot}. The work was hard, and {name} was soon "
    "tired. Then {article_friend} named {other} came by and helped. By the evening the house "
    "was ready. They painted the door {color} and had a party.",
    "{name} had {article_color} {thing}, but no one to play with. One day {name} met "
    "{article_friend} named {other} near {spot}. At first they were both shy. Then {name} "
    "shared the {thing}, and they played all day long.",
    "One day, {name} wanted to climb to the top of {spot}. {He} fell down two times, but {he}"
    ' did not give up. {article_friend_cap} named {other} saw it and said, "You can do it!" '
    "{name} tried once more and reached the top. From there {he} could see the whole world.",
    "In the winter, there was not much to eat. {name} had only one piece of bread. Near "
    "{spot}, {he} met {article_friend} named {other}, who was very hungry. {name} gave "
    "{other} half of the bread. In the spring, {other} brought {name} a basket full of "
    "apples.",
    "One day, {name} heard a strange sound near {spot}. It was {article_friend} named "
    "{other}, who was stuck in a hole. {name} took a long rope and pulled hard. Soon {other} "
    'was free. "Thank you, {name}!" said {other}.',
)
ENDINGS: tuple[str, ...] = (
    "From that day on, {name} and {other} were best friends.",
    "And they lived happily ever after.",
    "{name} went home and slept well that night.",
    "{name} learned that it is good to help others.",
    "They laughed and danced until the stars came out.",
)
OPENINGS: tuple[str, ...] = (
    "Once upon a time, there was {article_trait} {hero} named {name}. {name} lived in {place}.",
    "Once upon a time, {article_trait} {hero} named {name} lived in {place}.",
    "Once upon a time, in {place}, there lived {article_trait} {hero}. {His} name was {name}.",
)
HABITS: tuple[str, ...] = (
    "{name} liked to play near {spot}.",
    "Every day, {he} walked to {spot} and sang a song.",
    "{He} loved {color} {things} more than anything.",
    "All the animals liked {name}.",
)
REQUESTS: tuple[str, ...] = (
    "Tell me a story about {article_hero}.",
    "Tell me a short story about {article_hero}.",
    "Write a story about {article_hero} named {name}.",
    "Please tell me a story about {article_hero} named {name}.",
    "Can you tell me a story about {article_hero}?",
    "I want to hear a story about {article_hero} and {article_friend}.",
    "Write a short story about {article_hero} called {name}.",
    "Tell me a story about {article_hero} and {article_thing}.",
)
ANY_REQUESTS: tuple[str, ...] = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story.",
    "Can you tell me a story?",
    "I want to hear a story.",
    "Please tell me a bedtime story.",
    "Write me a short story, please.",
)


@dataclass(frozen=True)
class Story:
    """A request for a story and the story; `about` names the hero kind."""

    request: str
    text: str
    about: str


def _cast(rng: random.Random) -> dict[str, str]:
    """Draw who, where and what, in every form that the templates ask for."""
    girl, hero_is_animal = rng.random() < 0.5, rng.random() < 0.8
    hero = rng.choice(ANIMALS) if hero_is_animal else ("girl" if girl else "boy")
    name, other = rng.sample(GIRLS + BOYS, 2)
    if (name in GIRLS) != girl:
        name = rng.choice([n for n in (GIRLS if girl else BOYS) if n != other])
    friend = rng.choice([a for a in ANIMALS if a != hero])
    spot, spot2 = rng.sample(SPOTS, 2)
    thing, color, trait = rng.choice(THINGS), rng.choice(COLORS), rng.choice(TRAITS)
    he, his = ("she", "her") if girl else ("he", "his")
    return {
        "name": name,
        "other": other,
        "hero": hero,
        "friend": friend,
        "he": he,
        "He": he.capitalize(),
        "his": his,
        "His": his.capitalize(),
        "place": rng.choice(PLACES),
        "spot": spot,
        "spot2": spot2,
        "thing": thing,
        "things": plural(thing),
        "color": color,
        "article_color": article(color),
        "article_trait": article(trait),
        "article_hero": article(hero),
        "article_friend": article(friend),
        "article_friend_cap": article(friend).capitalize(),
        "article_thing": article(thing),
    }


def draw(rng: random.Random) -> Story:
    """Draw one request with its story. A thing named in the request plays a part in the story."""
    cast = _cast(rng)
    anything = rng.random() < 0.15
    request = rng.choice(ANY_REQUESTS if anything else REQUESTS)
    plots = [p for p in PLOTS if "{thing}" in p] if "{article_thing}" in request else list(PLOTS)
    parts = [rng.choice(OPENINGS)]
    if rng.random() < 0.5:
        parts.append(rng.choice(HABITS))
    parts += [rng.choice(plots), rng.choice(ENDINGS)]
    return Story(request.format(**cast), " ".join(parts).format(**cast), cast["hero"])


def vocabulary() -> frozenset[str]:
    """Every word a story may hold, in lower case: what a coherence check compares against."""
    texts = [*PLOTS, *ENDINGS, *OPENINGS, *HABITS, *PLACES, *SPOTS, *TRAITS, *GIRLS, *BOYS, *COLORS]
    texts += [*ANIMALS, *THINGS, *(plural(t) for t in THINGS), "girl boy a an he she his her"]
    found = re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", " ".join(texts)).lower())
    return frozenset(found)
