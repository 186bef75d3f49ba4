"""The word lists of the demo grammar.

They are small on purpose: a model of a few million parameters that sees each word often learns what
to do with it, and a byte-level BPE of 2,048 tokens gives nearly every word a token of its own.
"""

from __future__ import annotations

GIRLS = [
    "Anna", "Mia", "Lily", "Ella", "Nora", "Ruby", "Clara", "Zoe", "Eva", "Lucy", "Rosa", "Ida",
    "Maya", "Alice", "Emma", "Sara", "Lena", "Jane", "Olive", "Grace",
]  # fmt: skip
BOYS = [
    "Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Jack", "Noah", "Oscar", "Paul", "Hugo", "Adam",
    "Luke", "Karl", "Peter", "Otto", "Victor", "David", "Hans", "Ivan",
]  # fmt: skip
NAMES = GIRLS + BOYS

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "England": "London", "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Greece": "Athens",
    "Poland": "Warsaw", "Austria": "Vienna", "Ireland": "Dublin", "Portugal": "Lisbon",
    "Finland": "Helsinki", "Russia": "Moscow",
}  # fmt: skip
CITIES = [
    *CAPITALS.values(), "Boston", "Chicago", "Denver", "Seattle", "Toronto", "Sydney", "Geneva",
    "Milan", "Munich", "Hamburg", "Lyon", "Porto", "Osaka",
]  # fmt: skip

ANIMALS = [
    "fox", "cat", "dog", "rabbit", "bear", "mouse", "owl", "duck", "frog", "turtle", "squirrel",
    "hedgehog", "horse", "lion", "elephant", "penguin", "sheep", "goat", "wolf", "monkey",
]  # fmt: skip
FRUITS = [
    "apple", "pear", "plum", "lemon", "peach", "cherry", "banana", "orange", "mango", "grape",
    "melon", "fig",
]  # fmt: skip
COLORS = ["red", "blue", "green", "yellow", "black", "white", "brown", "pink", "purple", "gray"]
THINGS = [
    "ball", "kite", "lamp", "book", "cup", "hat", "drum", "bell", "boat", "key", "map", "box",
    "chair", "table", "spoon", "shoe", "clock", "coin", "ring", "rope",
]  # fmt: skip
JOBS = [
    "doctor", "teacher", "baker", "farmer", "pilot", "painter", "singer", "nurse", "sailor",
    "writer",
]  # fmt: skip
WEATHERS = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear"]
SONGS = [
    "Blue Moon", "Green River", "Silver Bells", "Summer Rain", "Morning Star", "Happy Days",
    "Golden Sun", "Winter Night",
]  # fmt: skip

# Words to sort: the first letters of one list always differ, so that the order can be learnt.
SORTABLE = {
    "a": ["ant", "apple"],
    "b": ["bear", "boat"],
    "c": ["cat", "cup"],
    "d": ["dog", "drum"],
    "e": ["egg", "elephant"],
    "f": ["fox", "fig"],
    "g": ["goat", "grape"],
    "h": ["hat", "horse"],
    "i": ["ice", "island"],
    "j": ["jam", "jacket"],
    "k": ["kite", "key"],
    "l": ["lamp", "lion"],
    "m": ["moon", "map"],
    "n": ["nest", "night"],
    "o": ["owl", "orange"],
    "p": ["pear", "plum"],
    "q": ["queen", "quilt"],
    "r": ["rain", "rope"],
    "s": ["sun", "shoe"],
    "t": ["tree", "tent"],
    "u": ["uncle", "umbrella"],
    "v": ["violin", "vase"],
    "w": ["wolf", "water"],
    "y": ["yarn", "yard"],
    "z": ["zebra", "zoo"],
}

NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
]  # fmt: skip

# Text beyond ASCII for the echo task: an engine that streams must put split characters together.
FOREIGN = [
    "café", "naïve", "über", "señor", "crème", "año", "Zürich", "São", "日本", "東京", "中文",
    "你好", "こんにちは", "안녕", "привет", "мир", "😀", "🎉", "🚀", "🌍", "❤️", "👍", "🐱",
    "☕", "→", "€", "½", "ñ", "ß", "Ω",
]  # fmt: skip

SYLLABLES = [
    "ba", "be", "bo", "da", "do", "fi", "ga", "ka", "ki", "la", "le", "lo", "ma", "mi", "mo",
    "na", "ne", "no", "pa", "ra", "ri", "ro", "sa", "so", "ta", "ti", "to", "va", "vi", "zu",
]  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "fast": "slow", "day": "night", "happy": "sad",
    "light": "dark", "old": "new", "open": "closed", "full": "empty", "wet": "dry",
    "hard": "soft", "high": "low", "long": "short", "good": "bad", "rich": "poor",
    "loud": "quiet", "early": "late", "left": "right", "strong": "weak",
}  # fmt: skip
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "lion": "roar",
    "mouse": "squeak", "owl": "hoot", "frog": "croak", "bee": "buzz", "horse": "neigh",
    "pig": "oink",
}  # fmt: skip
BABIES = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "bear": "cub", "duck": "duckling", "goat": "kid", "frog": "tadpole", "hen": "chick",
}  # fmt: skip
LEGS = {
    "cat": 4, "dog": 4, "bird": 2, "spider": 8, "ant": 6, "snake": 0, "fish": 0, "horse": 4,
    "bee": 6, "duck": 2, "cow": 4, "crab": 10,
}  # fmt: skip
THING_COLORS = {
    "grass": "green", "snow": "white", "a banana": "yellow", "the sky": "blue", "blood": "red",
    "coal": "black", "a lemon": "yellow", "milk": "white", "a carrot": "orange",
    "chocolate": "brown", "a tomato": "red", "a frog": "green",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
]  # fmt: skip

# Things the demo model is asked but does not know; it says so instead of guessing.
TOPICS = [
    "quantum physics", "the stock market", "history", "chemistry", "politics", "football",
    "the meaning of life", "computers", "music theory", "law", "medicine", "space travel",
    "economics", "philosophy", "cooking", "geology", "the internet", "dreams", "machine learning",
    "poetry", "taxes", "engines", "volcanoes", "languages", "dinosaurs", "electricity",
]  # fmt: skip

SYSTEMS = (
    "You are a helpful assistant.",
    "You are Slip, a small and friendly model.",
    "Answer in short and clear sentences.",
    "Be brief and kind.",
    "You are a kind teacher. Help the user.",
    "You are a careful assistant. Be exact.",
)


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    """The regular plural, with the few exceptions of the lists above."""
    irregular = {"mouse": "mice", "sheep": "sheep", "wolf": "wolves"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("x", "ch", "sh", "s")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def every_word() -> list[str]:
    """The words that are copied from prompts into answers: the tokenizer should know them whole."""
    words = [*NAMES, *CITIES, *FRUITS, *COLORS, *THINGS, *JOBS, *WEATHERS]
    return words + [w for pair in SORTABLE.values() for w in pair]
