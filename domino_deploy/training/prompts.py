"""Prompts of our own making: the demo's stated family (templated code), word problems and short chat questions.

`split` keeps the held-out prompts of each kind apart by the hash of their text; slots (verbs, objects, topics) are
shared between the two sides, the combinations are not.  That makes held-out prompts of the family an easy case by
construction, and the documentation says so.
"""

# ruff: noqa: SIM905  (word lists are easier to read in running text than one string a line)

from __future__ import annotations

import hashlib
import random
from typing import Literal

Split = Literal["train", "held-out"]

_SEED = 20261129  # any number; another one gives other held-out prompts

_VERBS = (
    "returns the sum of | returns the average of | returns the largest of | returns the smallest of | counts | sorts | "
    "reverses | shuffles | removes the duplicates from | finds the most common of | finds the second largest of | returns "
    "the median of | prints | groups by length | returns the first three of | returns the last of | checks for duplicates "
    "in | returns the unique ones among | multiplies together | returns every second one of | converts to strings | joins "
    "with commas | returns the index of the largest of | filters out the empty ones from | doubles each of | splits into "
    "two halves | returns a dictionary that counts | checks whether all are equal among | rotates by one place | returns "
    "the longest of"
).split(" | ")
_OBJECTS = (
    "a list of integers | a list of floats | the digits of a number | the words in a sentence | the characters in a string "
    "| the values of a dictionary | the keys of a dictionary | a list of strings | the lines of a text file | a tuple of "
    "numbers | a set of integers | the rows of a matrix | the columns of a matrix | the even numbers in a list | the odd "
    "numbers in a list | the prime numbers below n | the vowels in a string | the consonants in a word | the letters of the "
    "alphabet | the temperatures of a week | the prices in a shopping cart | the scores of a class | the names in a list | "
    "the dates in a list"
).split(" | ")
_FAMILY_VERBS = (
    "returns the sum of | returns the average of | returns the largest of | returns the smallest of | counts | sorts | "
    "reverses | removes the duplicates from | finds the most common of | finds the second largest of | returns the median of | "
    "checks for duplicates in | returns the unique ones among | multiplies together | doubles each of | returns the last of"
).split(" | ")
_FAMILY_OBJECTS = (
    "a list of integers | a list of floats | a tuple of numbers | a set of integers | a list of strings | "
    "the digits of a number | the words in a sentence | the characters in a string | the even numbers in a list | "
    "the odd numbers in a list"
).split(" | ")
_FAMILY_PHRASINGS = (
    "Write a Python function that {task}.",
    "Write a function in Python that {task}.",
    "Please write a short Python function that {task}.",
    "Implement a Python function that {task}, with an example.",
)
_NAMES = (
    "Anna | Ben | Carla | David | Elena | Farid | Grace | Hiro | Ines | Jonas | Kofi | Lena | Maya | Noah | Olga | Pablo | "
    "Quinn | Rosa | Samir | Tara | Uma | Viktor | Wendy | Yusuf"
).split(" | ")
_GOODS = (
    "apples | pencils | books | tickets | cookies | marbles | stickers | oranges | balloons | flowers | bottles of water | "
    "notebooks | eggs | candles | stamps | coins"
).split(" | ")
_PROBLEMS = (
    "{name} has {a} {goods} and buys {b} more. {other} takes {c} of them. How many {goods} does {name} have now?",
    "A box holds {b} {goods}. {name} fills {c} boxes and has {d} {goods} left over. How many {goods} did {name} have?",
    "{name} buys {c} {goods} for ${d} each and pays with a ${hundred} bill. How much change does {name} get?",
    "{name} reads {b} pages a day. The book has {big} pages. How many days does {name} need?",
    "A train travels {big} miles in {c} hours. What is its average speed in miles per hour?",
    "{name} earns ${b} an hour and works {c} hours a day for {d} days. How much does {name} earn?",
    "{name} is {a} years old. {other} is {c} years older. In {d} years, how old will they be together?",
    "There are {big} {goods}. {name} gives half of them to {other} and then loses {c}. How many are left?",
    "A recipe for {c} people needs {d} cups of flour. How many cups does {name} need for {b} people?",
    "{name} saves ${c} every week. How many weeks does it take {name} to save ${big}?",
    "{name} runs {c} kilometres on each weekday and {d} kilometres on each day of the weekend. How far does {name} run in a week?",
    "The price of {goods} falls by {pct}% from ${big}. What is the new price?",
    "A garden is {b} metres long and {c} metres wide. What are its area and its perimeter?",
    "{name} has {c} times as many {goods} as {other}. {other} has {d}. How many do they have together?",
    "A shop sells {b} {goods} on Monday, twice as many on Tuesday and {c} fewer on Wednesday than on Tuesday. "
    "How many does it sell in all?",
    "{name} shares {big} {goods} equally among {d} friends. How many does each friend get, and how many are left?",
    "Solve for x: {c}x + {d} = {big}.",
    "What is {pct}% of {big}?",
    "What is {a} + {b} * {c}?",
    "Find the average of {a}, {b}, {c} and {d}.",
    "If f(x) = {c}x^2 + {d}x - {b}, what is f({two})?",
    "What is the greatest common divisor of {a} and {big}?",
    "A bag holds {c} red and {d} blue marbles. What is the probability of drawing a red one?",
    "Simplify the fraction {b}/{big}.",
)
# Sentences of composed problems: an opening, some changes and a question about the same quantity.
_STORIES = {
    "count": (
        (
            "{name} has {a} {goods}.",
            "{name} starts the week with {a} {goods}.",
            "There are {a} {goods} in {name}'s {place}.",
            "{name} collected {a} {goods} last {season}.",
        ),
        (
            "{other} gives {name} {b} more.",
            "{name} buys {c} packs with {d} in each.",
            "On {day}, {name} gives {c} of them to {other}.",
            "Then half of them are sold.",
            "{name} finds {d} more in the {place}.",
            "A third of what is left is given to {other}.",
            "Every day for {c} days, {name} adds {two} more.",
            "{pct}% of them turn out to be broken and are thrown away.",
            "{other} has twice as many and gives {name} a quarter of those.",
        ),
        ("How many {goods} does {name} have in the end?", "How many {goods} are left?", "How many {goods} are there now?"),
    ),
    "money": (
        (
            "{name} has ${big}.",
            "{name} earns ${b} an hour and works {c} hours.",
            "{name} saves ${c} a day for {b} days.",
            "{name} sells {a} {goods} at ${d} each.",
        ),
        (
            "{name} buys {c} {goods} for ${two} each.",
            "The ticket to the {place} costs ${d}.",
            "{other} pays back ${b}.",
            "{name} spends a quarter of the money on food.",
            "Rent takes {pct}% of it.",
            "On {day}, {name} earns another ${a}.",
            "Half of it goes to {other}.",
            "There is a {pct}% tax on the whole amount.",
        ),
        ("How much money does {name} have left?", "How many dollars remain?", "How much does {name} have now?"),
    ),
    "time": (
        (
            "{name} reads a book of {big} pages.",
            "{name} has to drive {big} miles to the {place}.",
            "{name} must paint {a} fences.",
            "{name} wants to type {big} words.",
        ),
        (
            "In the first hour {name} does {b} of them.",
            "After {two} hours {name} takes a break of {d} minutes.",
            "From then on {name} is twice as fast.",
            "{other} helps and does {c} an hour.",
            "On {day} {name} does {pct}% of it.",
        ),
        ("How many hours does it take in all?", "How long does {name} need?", "How much is left to do after {c} hours?"),
    ),
}
_PLACES = "garden | shop | box | classroom | library | museum | kitchen | basement | farm | market | zoo | park".split(" | ")
_DAYS = "Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday".split(" | ")
_SEASONS = "spring | summer | autumn | winter".split(" | ")
# As DFlash and Domino word it in their evaluations.
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_QUESTIONS = (
    "What is {topic}? | Explain {topic} to a ten-year-old. | Give three tips about {topic}. | Write a short story about "
    "{topic}. | Write a poem about {topic}. | List five facts about {topic}. | Why is {topic} important? | Describe {topic} "
    "in two sentences. | What are the advantages and disadvantages of {topic}? | Write an email to a friend about {topic}. "
    "| How has {topic} changed in the last century? | Suggest a title and an outline for an article on {topic}. | What are "
    "common mistakes people make with {topic}? | Compare {topic} with {second}. | How do I get started with {topic}?"
).split(" | ")
_TOPICS = (
    "photosynthesis | gravity | the water cycle | machine learning | healthy eating | public speaking | climate change | "
    "the Roman Empire | jazz music | time management | recycling | solar energy | chess | gardening | meditation | the "
    "human heart | volcanoes | democracy | inflation | remote work | bicycles | coffee | learning a language | the Moon | "
    "bees | electric cars | sleep | friendship | job interviews | vaccines | black holes | personal budgets | the printing "
    "press | earthquakes | dogs | tea | museums | the internet | running | wind power | libraries | evolution | photography "
    "| the stock market | cooking rice | stress | antibiotics | the French Revolution | mountains | robots | video games | "
    "teamwork | the Great Wall of China | rivers | computer security | yoga | baking bread | philosophy | airplanes | "
    "weather forecasts | whales | paper | traffic jams | the Olympic Games | poetry | memory | cheese | space travel | "
    "rainforests | insurance"
).split(" | ")


def is_held_out(prompt: str) -> bool:
    """One prompt in five, decided by its text alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 5 == 0


def templated_code(split: Split) -> list[str]:
    """The demo's stated family: one Python function asked for by a verb and an object, in one of four phrasings.

    A combination of verb and object is held out in all phrasings.
    """
    prompts = []
    for verb in _FAMILY_VERBS:
        for thing in _FAMILY_OBJECTS:
            task = f"{verb} {thing}"
            if is_held_out(f"Write a Python function that {task}.") == (split == "held-out"):
                prompts += [phrasing.format(task=task) for phrasing in _FAMILY_PHRASINGS]
    random.Random(_SEED).shuffle(prompts)
    return prompts


def broad_code(split: Split) -> list[str]:
    """As the family, in its first phrasing, over more verbs and objects than go well together."""
    return _shuffled([f"Write a Python function that {verb} {thing}." for verb in _VERBS for thing in _OBJECTS], split)


def word_problems(split: Split, count: int) -> list[str]:
    """Short arithmetic and algebra, half of them with the usual request for a boxed answer."""
    rng = random.Random(_SEED)
    prompts: list[str] = []
    while len(prompts) < count:
        name, other = rng.sample(_NAMES, 2)
        values = {
            "a": rng.randint(12, 60),
            "b": rng.randint(5, 40),
            "c": rng.randint(3, 9),
            "d": rng.randint(2, 12),
            "two": rng.randint(2, 5),
        }
        values |= {"big": rng.randint(6, 40) * 12, "hundred": rng.choice((100, 200)), "pct": rng.choice((5, 10, 15, 20, 25, 40, 50))}
        text = rng.choice(_PROBLEMS).format(name=name, other=other, goods=rng.choice(_GOODS), **values) + rng.choice(("", BOXED))
        if is_held_out(text) == (split == "held-out"):
            prompts.append(text)
    return prompts


def story_problems(count: int) -> list[str]:
    """Arithmetic in two to five sentences put together at random, three quarters of them with the request for a boxed answer.

    For training only: some have no sensible answer, which does not matter to a drafter.
    """
    rng = random.Random(_SEED)
    prompts = []
    for _ in range(count):
        openings, changes, questions = rng.choice(list(_STORIES.values()))
        sentences = [rng.choice(openings), *rng.sample(changes, rng.randint(1, 3)), rng.choice(questions)]
        name, other = rng.sample(_NAMES, 2)
        slots: dict[str, object] = {"name": name, "other": other, "goods": rng.choice(_GOODS), "place": rng.choice(_PLACES)}
        slots |= {"day": rng.choice(_DAYS), "season": rng.choice(_SEASONS), "pct": rng.choice((5, 10, 20, 25, 30, 50))}
        slots |= {"a": rng.randint(12, 90), "b": rng.randint(5, 40), "c": rng.randint(2, 9), "d": rng.randint(3, 20)}
        slots |= {"two": rng.randint(2, 5), "big": rng.randint(10, 80) * 10}
        prompts.append(" ".join(sentences).format(**slots) + (BOXED if rng.random() < 0.75 else ""))
    return prompts


def short_chat(split: Split) -> list[str]:
    """Questions and small writing tasks about everyday topics."""
    pairs = zip(_TOPICS, (*_TOPICS[7:], *_TOPICS[:7]), strict=True)
    return _shuffled([question.format(topic=topic, second=second) for topic, second in pairs for question in _QUESTIONS], split)


def _shuffled(prompts: list[str], split: Split) -> list[str]:
    kept = [prompt for prompt in prompts if is_held_out(prompt) == (split == "held-out")]
    random.Random(_SEED).shuffle(kept)
    return kept
