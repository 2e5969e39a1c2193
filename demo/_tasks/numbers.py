"""Tasks with numbers: counting, sorting, sums."""

import random

from demo import words as w
from demo._tasks.phrases import plural
from demo._tasks.task import Task, join, length


def count(rng: random.Random) -> Task:
    """Numbers in order, up, down or in steps."""
    style = rng.random()
    n = length(rng, 8, 3, 24) if rng.random() < 0.93 else rng.randint(25, 100)
    if style < 0.68:
        first = 1 if rng.random() < 0.35 else rng.randint(0, 20) if rng.random() < 0.6 else rng.randint(0, 80)
        last = first + n - 1
        numbers = range(first, last + 1)
        ask = rng.choice(("Count from {} to {}:", "Count from {} to {}.", "Please count from {} to {}."))
        prompt = ask.format(first, last)
    elif style < 0.85:
        last = rng.choice((0, 1, 1, rng.randint(0, 20)))
        first = last + min(n, 30) - 1
        numbers = range(first, last - 1, -1)
        prompt = rng.choice(("Count down from {} to {}:", "Count backwards from {} to {}.")).format(
            first, last
        )
    else:
        step = rng.choice((2, 2, 5, 10))
        first = rng.choice((0, step))
        last = first + step * (min(n, 20) - 1)
        numbers = range(first, last + 1, step)
        prompt = rng.choice(("Count from {} to {} in steps of {}:", "Count by {2} from {0} to {1}:"))
        prompt = prompt.format(first, last, step)
    return Task("count", prompt, join(numbers), exact=True)


def sort(rng: random.Random) -> Task:
    """Numbers or words put in order, or the largest or smallest of them."""
    style = rng.random()
    if style < 0.08:
        items = rng.sample(w.WORDS + w.ANIMALS + w.FRUITS, rng.randint(2, 4))
        items = list(dict.fromkeys(items))
        prompt = rng.choice(("Sort these words: {}", "Put these words in alphabetical order: {}")).format(
            join(items)
        )
        return Task("sort", prompt, join(sorted(items)), separator="\n", exact=True)
    numbers = rng.sample(range(100 if rng.random() < 0.4 else 20), length(rng, 3.5, 2, 7, 0.4))
    if style < 0.65:
        ask = rng.choice(("Sort these numbers: {}", "Sort the list: {}", "Sort from smallest to largest: {}"))
        return Task("sort", ask.format(join(numbers)), join(sorted(numbers)), separator="\n", exact=True)
    if style < 0.8:
        ask = rng.choice(("Sort from largest to smallest: {}", "Sort these numbers in descending order: {}"))
        answer = join(sorted(numbers, reverse=True))
        return Task("sort", ask.format(join(numbers)), answer, separator="\n", exact=True)
    largest = rng.random() < 0.5
    prompt = f"Which number is the {'largest' if largest else 'smallest'}: {join(numbers)}?"
    return Task("sort", prompt, str(max(numbers) if largest else min(numbers)), exact=True)


def math(rng: random.Random) -> Task:
    """Small sums, tables, and word problems that fit in one line."""
    style = rng.random()
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.05:
        a, b = rng.randint(0, 30), rng.randint(0, 30)
    if style < 0.5:
        sign = rng.choice("++-*")
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if sign == "*":
            a, b = a % 11, b % 11
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        ask = rng.choice(("What is {} {} {}?", "What is {} {} {}?", "{} {} {} =", "Calculate {} {} {}."))
        return Task("math", ask.format(a, sign, b), str(result), exact=True)
    if style < 0.66:
        n = rng.randint(2, 12)
        rows = [f"{i} x {n} = {i * n}" for i in range(1, rng.choice((5, 10, 10, 12)) + 1)]
        prompt = f"Write the multiplication table of {n} up to {len(rows)}:"
        return Task("math", prompt, "\n".join(rows), separator="\n", exact=True)
    if style < 0.84:
        name, thing = rng.choice(w.NAMES), plural(rng.choice(w.FRUITS + w.OBJECTS))
        pronoun = "she" if name in w.FEMALE else "he"
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        if rng.random() < 0.6:
            prompt = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {pronoun} have?"
            return Task("math", prompt, f"{a} + {b} = {a + b}. {name} has {a + b} {thing}.", exact=True)
        a = b + rng.randint(2, 9)
        prompt = f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?"
        return Task("math", prompt, f"{a} - {b} = {a - b}. There are {a - b} {thing} left.", exact=True)
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(3, 5))]
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    answer = f"{join(steps)}. The sum is {total}."
    return Task(
        "math", f"Add these numbers step by step: {join(numbers)}", answer, separator="\n", exact=True
    )
