"""Tasks with lists and texts: copying, continuing, editing."""

import random

from demo import words as w
from demo._tasks.phrases import sentence, some_words
from demo._tasks.task import Task, join, length


def copy(rng: random.Random) -> Task:
    """The same text again, or one word many times."""
    style = rng.random()
    if style < 0.66:
        text = sentence(rng) if rng.random() < 0.5 else " ".join(some_words(rng, length(rng, 4, 1, 24)))
        ask = rng.choice(("Repeat after me: {}", "Copy this text: {}", "Echo: {}", "Please repeat: {}"))
        return Task("copy", ask.format(text), text, separator="\n", exact=True)
    if style < 0.8:
        word, n = rng.choice(w.WORDS + w.ANIMALS), length(rng, 4, 2, 10)
        if rng.random() < 0.5:
            return Task("copy", f"Repeat the word {word} {n} times:", " ".join([word] * n), exact=True)
        return Task("copy", f"Say {word} {n} times.", " ".join([word] * n), exact=True)
    items = some_words(rng, length(rng, 4, 2, 14))
    return Task("copy", f"Copy this list: {join(items)}", join(items), separator="\n", exact=True)


def sequence(rng: random.Random) -> Task:
    """Known lists and patterns continued, and lists of things of one sort."""
    style = rng.random()
    if style < 0.42:
        full = rng.choice(w.SEQUENCES)
        first = rng.randrange(0, max(1, len(full) - 3))
        given = rng.randint(2, 3) if len(full) > 4 else 2
        shown, rest = full[first : first + given], full[first + given :]
        ask = rng.choice(("{},", "Continue the list: {},", "Continue: {},", "What comes next? {},"))
        return Task("list", ask.format(join(shown)), join(rest), exact=True, closed=True)
    if style < 0.6:
        period = rng.choice((2, 2, 3))
        pattern = some_words(rng, period)
        n = length(rng, 5, 2, 12)
        shown = (pattern * 3)[: period + rng.randint(2, period + 1)]
        rest = [pattern[(len(shown) + i) % period] for i in range(n)]
        return Task(
            "list", f"Continue the pattern with {n} more words: {' '.join(shown)}", " ".join(rest), exact=True
        )
    if style < 0.8:
        step, first, given = rng.choice((1, 2, 5, 10)), rng.randint(0, 20), rng.randint(2, 4)
        numbers = [first + step * i for i in range(given + length(rng, 6, 2, 24))]
        prompt = f"Continue the list up to {numbers[-1]}: {join(numbers[:given])},"
        return Task("list", prompt, join(numbers[given:]), exact=True)
    noun, pool = rng.choice(
        (
            ("animals", w.ANIMALS),
            ("fruits", w.FRUITS),
            ("colours", w.COLOURS),
            ("cities", w.CITIES),
            ("names", w.NAMES),
        )
    )
    n = rng.randint(2, min(10, len(pool)))
    chosen = rng.sample(pool, n)
    if rng.random() < 0.5:
        return Task("list", f"Name {n} {noun}:", join(chosen), closed=True)
    lines = [f"{i}. {item}" for i, item in enumerate(chosen, start=1)]
    return Task("list", f"Write a numbered list of {n} {noun}:", "\n".join(lines), "\n", closed=True)


def edit(rng: random.Random) -> Task:
    """One change to a given list or text."""
    items = some_words(rng, length(rng, 3.5, 2, 8, 0.4))
    style = rng.randrange(7)
    if style == 0:
        return Task("edit", f"Reverse this list: {join(items)}", join(items[::-1]), "\n", exact=True)
    if style == 1:
        return Task("edit", f"What is the first word of: {' '.join(items)}", items[0], "\n", exact=True)
    if style == 2:
        return Task("edit", f"What is the last word of: {' '.join(items)}", items[-1], "\n", exact=True)
    if style == 3:
        word = rng.choice(w.WORDS + w.ANIMALS + w.OBJECTS)
        return Task("edit", f"Spell the word {word}:", "-".join(word), exact=True)
    if style == 4:
        return Task(
            "edit",
            f"Number these items: {join(items)}",
            "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)),
            "\n",
            exact=True,
        )
    if style == 5:
        return Task(
            "edit",
            f"How many words are in this list? {join(items[:9])}",
            str(len(items[:9])),
            "\n",
            exact=True,
        )
    old, new = rng.choice(items), rng.choice(w.COLOURS)
    text = " ".join(items)
    changed = " ".join(new if item == old else item for item in items)
    return Task("edit", f"Replace {old} with {new}: {text}", changed, "\n", exact=True)
