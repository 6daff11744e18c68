"""Demo conversations: an endless, deterministic stream of small tasks whose answers follow from the question.

They exist so that a machine without a network runs the whole pipeline on something real: a tiny model learns them in
a minute, and a drafter trained on its hidden states has regular phrasing to predict. Conversation `i` of a seed depends
on nothing but (seed, i), so the first 1,000 are a prefix of the first 100,000, and any one can be made alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

Turn = tuple[str, str]  # what the user says, what the assistant answers

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Noah Olga Paul Rosa Sam Tina Victor".split()
NOUNS = (
    "apple ball bird boat book box bread bridge cake camera car chair clock cloud cup desk dog door egg fish flower "
    "garden glass hat horse house island key kite lamp leaf letter map milk moon mountain night ocean paper pencil "
    "phone picture plant queen rain ring river road rose salt school ship shoe snow song star stone street sugar sun "
    "table train tree village water window wood"
).split()
COLOURS = "black blue brown green grey orange pink purple red silver white yellow".split()
PLACES = "garden market station library harbour museum school theatre bakery park".split()
VERBS = "build clean draw find fix open paint sell wash watch".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CAPITALS = {
    "Austria": ("Vienna", "Europe"),
    "Belgium": ("Brussels", "Europe"),
    "Brazil": ("Brasilia", "South America"),
    "Canada": ("Ottawa", "North America"),
    "Chile": ("Santiago", "South America"),
    "China": ("Beijing", "Asia"),
    "Cuba": ("Havana", "North America"),
    "Denmark": ("Copenhagen", "Europe"),
    "Egypt": ("Cairo", "Africa"),
    "Finland": ("Helsinki", "Europe"),
    "France": ("Paris", "Europe"),
    "Germany": ("Berlin", "Europe"),
    "Ghana": ("Accra", "Africa"),
    "Greece": ("Athens", "Europe"),
    "Hungary": ("Budapest", "Europe"),
    "India": ("New Delhi", "Asia"),
    "Ireland": ("Dublin", "Europe"),
    "Italy": ("Rome", "Europe"),
    "Japan": ("Tokyo", "Asia"),
    "Kenya": ("Nairobi", "Africa"),
    "Mexico": ("Mexico City", "North America"),
    "Norway": ("Oslo", "Europe"),
    "Peru": ("Lima", "South America"),
    "Poland": ("Warsaw", "Europe"),
    "Portugal": ("Lisbon", "Europe"),
    "Spain": ("Madrid", "Europe"),
    "Sweden": ("Stockholm", "Europe"),
    "Thailand": ("Bangkok", "Asia"),
    "Turkey": ("Ankara", "Asia"),
    "Vietnam": ("Hanoi", "Asia"),
}
OPPOSITES = {
    "big": "small",
    "cold": "hot",
    "dark": "light",
    "early": "late",
    "empty": "full",
    "fast": "slow",
    "hard": "soft",
    "high": "low",
    "long": "short",
    "loud": "quiet",
    "new": "old",
    "open": "closed",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "young": "old",
}
SYSTEM = (  # (system prompt, what each answer then begins with, what it ends with)
    ("You are a helpful assistant.", "", ""),
    ("You are a friendly teacher. Begin every answer with: Good question.", "Good question. ", ""),
    ("Begin every answer with: Sure.", "Sure. ", ""),
    ("End every answer with: I hope this helps.", "", " I hope this helps."),
)


def _words(rng: random.Random, low: int = 3, high: int = 5) -> list[str]:
    return rng.sample(NOUNS, rng.randint(low, high))


def _addition(rng: random.Random) -> list[Turn]:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    ask = rng.choice(("What is {} plus {}?", "Add {} and {}.", "Please work out {} plus {} for me."))
    turns = [
        (
            ask.format(a, b),
            f"The answer is {a + b}. We start with {a} and add {b}, so the sum of the two numbers is {a + b}.",
        )
    ]
    if rng.random() < 0.4:
        turns.append(
            (
                "How can I check that?",
                f"You can check it by going back. If you take {b} away from {a + b}, you get {a} again, "
                "so the answer is right.",
            )
        )
    return turns


def _subtraction(rng: random.Random) -> list[Turn]:
    b, rest = rng.randint(1, 10), rng.randint(1, 10)
    a = b + rest
    ask = rng.choice(("What is {} minus {}?", "Take {1} away from {0}.", "Please work out {} minus {} for me."))
    return [
        (
            ask.format(a, b),
            f"The answer is {rest}. We start with {a} and take away {b}, so the difference of the two numbers is {rest}.",
        )
    ]


def _multiplication(rng: random.Random) -> list[Turn]:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    ask = rng.choice(("What is {} times {}?", "Multiply {} by {}."))
    return [
        (
            ask.format(a, b),
            f"The answer is {a * b}. If you add {a} to itself {b} times, the product of the two numbers is {a * b}.",
        )
    ]


def _repeat(rng: random.Random) -> list[Turn]:
    words = _words(rng)
    ask = rng.choice(("Repeat these words: {}.", "Please say these words again: {}.", "Copy this list: {}."))
    turns = [(ask.format(", ".join(words)), f"Here are the words again: {', '.join(words)}. There are {len(words)} words.")]
    if rng.random() < 0.5:
        which, word = rng.choice((("first", words[0]), ("last", words[-1])))
        turns.append((f"Which word came {which}?", f"The {which} word in your list of {len(words)} words is {word}."))
    return turns


def _reverse(rng: random.Random) -> list[Turn]:
    words = _words(rng, 3, 4)
    ask = rng.choice(("Reverse these words: {}.", "Say these words from the last to the first: {}."))
    return [
        (
            ask.format(", ".join(words)),
            f"Here are the words in reverse order: {', '.join(words[::-1])}. The list now starts with {words[-1]}.",
        )
    ]


def _sort(rng: random.Random) -> list[Turn]:
    words = _words(rng, 2, 3)
    ask = rng.choice(("Sort these words: {}.", "Put these words in the order of the alphabet: {}."))
    ordered = ", ".join(sorted(words))
    return [(ask.format(", ".join(words)), f"Here are the words in the order of the alphabet: {ordered}.")]


def _capital(rng: random.Random) -> list[Turn]:
    country = rng.choice(list(CAPITALS))
    city, continent = CAPITALS[country]
    if rng.random() < 0.3:
        return [(f"Which country has the capital {city}?", f"{city} is the capital of {country}, a country in {continent}.")]
    ask = rng.choice(("What is the capital of {}?", "Tell me the capital of {}.", "Name the capital city of {}."))
    turns = [(ask.format(country), f"The capital of {country} is {city}. It is the seat of the government of {country}.")]
    if rng.random() < 0.5:
        turns.append((f"Where is {country}?", f"{country} is a country in {continent}, and its capital is {city}."))
    return turns


def _opposite(rng: random.Random) -> list[Turn]:
    word = rng.choice(list(OPPOSITES))
    noun = rng.choice(NOUNS)
    return [
        (
            f"What is the opposite of {word}? Use it for a {noun}.",
            f"The opposite of {word} is {OPPOSITES[word]}. For example, one {noun} is {word}, "
            f"but the other {noun} is {OPPOSITES[word]}.",
        )
    ]


def _count(rng: random.Random) -> list[Turn]:
    first, length = rng.randint(1, 12), rng.randint(4, 9)
    step = rng.choice((1, 1, 2))
    numbers = [first + step * i for i in range(length)]
    if step == 1 and rng.random() < 0.3:
        numbers.reverse()
    listed = ", ".join(map(str, numbers))
    how = " in steps of two" if step == 2 else ""
    return [
        (
            f"Count from {numbers[0]} to {numbers[-1]}{how}.",
            f"Let us count from {numbers[0]} to {numbers[-1]}{how}: {listed}. Now we have reached {numbers[-1]}.",
        )
    ]


def _calendar(rng: random.Random) -> list[Turn]:
    kind, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    i = rng.randrange(len(names))
    where, other = rng.choice((("after", names[(i + 1) % len(names)]), ("before", names[i - 1])))
    return [
        (
            f"Which {kind} comes {where} {names[i]}?",
            f"The {kind} that comes {where} {names[i]} is {other}. There are {len(names)} {kind}s in a "
            f"{'week' if kind == 'day' else 'year'}.",
        )
    ]


def _who(rng: random.Random) -> list[Turn]:
    people, things, colours = rng.sample(NAMES, 2), rng.sample(NOUNS, 2), rng.sample(COLOURS, 2)
    held = [f"{p} has a {c} {t}" for p, c, t in zip(people, colours, things)]
    i = rng.randrange(2)
    turns = [
        (
            f"{held[0]} and {held[1]}. Who has the {things[i]}?",
            f"{people[i]} has the {things[i]}. It is the {colours[i]} one.",
        )
    ]
    if rng.random() < 0.5:
        j = 1 - i
        turns.append((f"And what does {people[j]} have?", f"{people[j]} has the {things[j]}. It is the {colours[j]} one."))
    return turns


def _letter(rng: random.Random) -> list[Turn]:
    writer, reader = rng.sample(NAMES, 2)
    place, day, noun = rng.choice(PLACES), rng.choice(DAYS), rng.choice(NOUNS)
    return [
        (
            f"Write a short letter from {writer} to {reader}. They will meet at the {place} on {day} and bring a {noun}.",
            f"Dear {reader},\nI hope you are well. I would like to meet you at the {place} on {day}. "
            f"Please do not forget to bring a {noun}. I look forward to seeing you.\nBest wishes,\n{writer}",
        )
    ]


def _steps(rng: random.Random) -> list[Turn]:
    verb, colour, noun = rng.choice(VERBS), rng.choice(COLOURS), rng.choice(NOUNS)
    thing = f"{colour} {noun}"
    return [
        (
            f"How do I {verb} a {thing}?",
            f"To {verb} a {thing}, follow these steps:\n1. Find a quiet place for the {thing}.\n"
            f"2. Collect all the tools that you need.\n3. Take your time and {verb} the {thing}.\n"
            f"4. Look at the {noun} again and enjoy the result.",
        )
    ]


def _code(rng: random.Random) -> list[Turn]:
    name, symbol, compute = rng.choice(
        (("add", "+", lambda x, k: x + k), ("subtract", "-", lambda x, k: x - k), ("multiply", "*", lambda x, k: x * k))
    )
    noun, k, x = rng.choice(NOUNS), rng.randint(2, 9), rng.randint(1, 9) + 9
    phrase = {"add": f"adds {k} to", "subtract": f"subtracts {k} from", "multiply": f"multiplies by {k}"}[name]
    turns = [
        (
            f"Write a Python function that {phrase} the number {noun}.",
            f"Here is the function:\n```python\ndef {name}_{k}({noun}):\n    return {noun} {symbol} {k}\n```\n"
            f"It takes the number {noun} and returns the result.",
        )
    ]
    if rng.random() < 0.3:
        turns.append(
            (
                f"What does it return for {x}?",
                f"For {x} the function returns {x} {symbol} {k}, and that is {compute(x, k)}.",
            )
        )
    return turns


TASKS: tuple[Callable[[random.Random], list[Turn]], ...] = (
    _addition,
    _subtraction,
    _multiplication,
    _repeat,
    _reverse,
    _sort,
    _capital,
    _opposite,
    _count,
    _calendar,
    _who,
    _letter,
    _steps,
    _code,
)


def conversation(seed: int | str, index: int) -> dict[str, Any]:
    """Conversation `index` of stream `seed`: {"messages": [{"role", "content"}, ...]}, one to about seven turns."""
    rng = random.Random(f"{seed}:{index}")
    system, begin, end = rng.choice(SYSTEM) if rng.random() < 0.4 else ("", "", "")
    name = rng.choice(NAMES) if rng.random() < 0.5 else None
    tasks = rng.sample(TASKS, rng.choices((1, 2, 3), weights=(4, 4, 2))[0])
    turns = [turn for task in tasks for turn in task(rng)]
    if rng.random() < 0.25:
        who = f", {name}" if name else ""
        turns.append(("Thank you!", f"You are welcome{who}. It was a pleasure to help you. Have a nice day!"))
    messages = [{"role": "system", "content": system}] if system else []
    for i, (ask, answer) in enumerate(turns):
        if i == 0 and name:
            ask, answer = f"Hello, I am {name}. {ask}", f"Hello {name}. {answer}"
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "content": f"{begin}{answer}{end}"})
    return {"messages": messages}


def conversations(seed: int | str) -> Iterator[dict[str, Any]]:
    """The endless stream of conversations of `seed`, in an order that never changes."""
    return (conversation(seed, i) for i in itertools.count())


def eval_prompts(seed: int | str, count: int) -> list[dict[str, Any]]:
    """`count` single questions from a stream no training data comes from.

    Each is {"messages": [one user message], "reference": the right answer, "category": the task's name}; categories
    take turns, so that every `len(TASKS)` prompts cover all.
    """
    prompts = []
    for i in range(count):
        rng = random.Random(f"eval:{seed}:{i}")
        task = TASKS[i % len(TASKS)]
        ask, answer = task(rng)[0]
        prompts.append(
            {
                "messages": [{"role": "user", "content": ask}],
                "reference": answer,
                "category": task.__name__.strip("_"),
            }
        )
    return prompts
