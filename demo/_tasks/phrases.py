"""Words, sentences and their grammar, by the word lists."""

import random

from demo import words as w


def _pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))


def some_words(rng: random.Random, n: int) -> list[str]:
    """Return n words, at times numbers or words that do not exist."""
    if rng.random() < 0.08:
        return [_pseudo_word(rng) if rng.random() < 0.7 else str(rng.randint(0, 99)) for _ in range(n)]
    pool = w.WORDS + w.ANIMALS + w.OBJECTS + w.COLOURS + w.FRUITS
    return [rng.choice(pool) for _ in range(n)]


def sentence(rng: random.Random) -> str:
    """Return a sentence of the word lists."""
    who = f"the {rng.choice(w.ADJECTIVES)} {rng.choice(w.ANIMALS + w.JOBS)}"
    pattern = rng.choice(
        (
            "{who} found a {look} {thing} in the {place}.",
            "{who} lives near the {place}.",
            "{who} likes {food} and {fruits}.",
            "{name} and {who} went to the {place}.",
            "{name} gave the {thing} to {who}.",
            "in the {place} {who} can {verb} all day.",
        )
    )
    text = pattern.format(
        who=who,
        name=rng.choice(w.NAMES),
        look=rng.choice(w.LOOKS),
        thing=rng.choice(w.OBJECTS),
        place=rng.choice(w.PLACES),
        food=rng.choice(w.FOODS),
        fruits=plural(rng.choice(w.FRUITS)),
        verb=rng.choice(w.VERBS),
    )
    return text[0].upper() + text[1:]


def plural(noun: str) -> str:
    """The plural of a noun from the word lists."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun == "mango" or noun.endswith(("ch", "sh", "x", "ss")):
        return noun + "es"
    return noun + "s"


def article(text: str) -> str:
    """Return the text with its indefinite article."""
    return ("an " if text[0] in "aeiou" else "a ") + text
