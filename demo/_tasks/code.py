"""Small Python functions."""

import random
from typing import Final

from demo._tasks.task import Task

# name, arguments, what it does, body; {a} {b} {xs} are filled with argument names
_FUNCTIONS: Final = (
    ("add", "{a}, {b}", "adds two numbers", "return {a} + {b}"),
    ("subtract", "{a}, {b}", "subtracts the second number from the first", "return {a} - {b}"),
    ("multiply", "{a}, {b}", "multiplies two numbers", "return {a} * {b}"),
    ("divide", "{a}, {b}", "divides the first number by the second", "return {a} / {b}"),
    ("square", "{a}", "returns the square of a number", "return {a} * {a}"),
    ("double", "{a}", "doubles a number", "return 2 * {a}"),
    ("is_even", "{a}", "tells whether a number is even", "return {a} % 2 == 0"),
    ("is_odd", "{a}", "tells whether a number is odd", "return {a} % 2 == 1"),
    ("is_empty", "{xs}", "tells whether a list is empty", "return len({xs}) == 0"),
    ("first", "{xs}", "returns the first item of a list", "return {xs}[0]"),
    ("last", "{xs}", "returns the last item of a list", "return {xs}[-1]"),
    ("reverse", "{xs}", "reverses a list", "return {xs}[::-1]"),
    ("length", "{xs}", "returns the length of a list", "return len({xs})"),
    ("greet", "name", "greets somebody", 'return f"Hello, {{name}}!"'),
    ("maximum", "{a}, {b}", "returns the larger of two numbers", "if {a} > {b}:\n        return {a}\n    return {b}"),
    ("minimum", "{a}, {b}", "returns the smaller of two numbers", "if {a} < {b}:\n        return {a}\n    return {b}"),
    ("absolute", "{a}", "returns the absolute value of a number", "if {a} < 0:\n        return -{a}\n    return {a}"),
    ("total", "{xs}", "adds up a list of numbers", "result = 0\n    for x in {xs}:\n        result += x\n    return result"),
    ("product", "{xs}", "multiplies a list of numbers", "result = 1\n    for x in {xs}:\n        result *= x\n    return result"),
    ("average", "{xs}", "returns the mean of a list of numbers", "return sum({xs}) / len({xs})"),
    ("count_items", "{xs}, {a}", "counts how often an item is in a list",
     "n = 0\n    for x in {xs}:\n        if x == {a}:\n            n += 1\n    return n"),
    ("contains", "{xs}, {a}", "tells whether an item is in a list",
     "for x in {xs}:\n        if x == {a}:\n            return True\n    return False"),
    ("largest", "{xs}", "returns the largest number of a list",
     "best = {xs}[0]\n    for x in {xs}:\n        if x > best:\n            best = x\n    return best"),
    ("smallest", "{xs}", "returns the smallest number of a list",
     "best = {xs}[0]\n    for x in {xs}:\n        if x < best:\n            best = x\n    return best"),
    ("only_even", "{xs}", "keeps the even numbers of a list", "return [x for x in {xs} if x % 2 == 0]"),
    ("squares", "{xs}", "squares every number of a list", "return [x * x for x in {xs}]"),
    ("factorial", "{a}", "returns the factorial of a number", "if {a} < 2:\n        return 1\n    return {a} * factorial({a} - 1)"),
    ("fibonacci", "{a}", "returns a Fibonacci number",
     "if {a} < 2:\n        return {a}\n    return fibonacci({a} - 1) + fibonacci({a} - 2)"),
    ("power", "{a}, {b}", "raises a number to a power",
     "result = 1\n    for _ in range({b}):\n        result *= {a}\n    return result"),
    ("read_text", "path", "reads a text file", "with open(path) as file:\n        return file.read()"),
    ("count_words", "text", "counts the words of a text", "return len(text.split())"),
    ("shout", "text", "writes a text in capital letters", "return text.upper() + \"!\""),
)  # fmt: skip


def code(rng: random.Random) -> Task:
    """A small Python function, from its head or from a sentence."""
    name, arguments, purpose, body = rng.choice(_FUNCTIONS)
    a, b = rng.choice(
        (("a", "b"), ("x", "y"), ("m", "n"), ("left", "right"), ("first_number", "second_number"))
    )
    if "{xs}" in arguments and a == "x":
        a, b = "item", "other"
    xs = rng.choice(("items", "numbers", "values", "xs"))
    names = {"a": a, "b": b, "xs": xs}
    head = f"def {name}({arguments.format(**names)}):"
    doc = "" if rng.random() < 0.5 else f'    """{purpose[0].upper() + purpose[1:]}."""\n'
    text = f"{doc}    {body.format(**names)}"
    if rng.random() < 0.55:
        if doc and rng.random() < 0.5:
            return Task("code", f"{head}\n{doc.rstrip()}", text[len(doc) :], "\n", exact=True, closed=True)
        return Task("code", head, text, "\n", closed=True)
    ask = rng.choice(("Write a Python function that {}.", "Write a function {}({}) that {}."))
    prompt = ask.format(purpose) if "{}(" not in ask else ask.format(name, arguments.format(**names), purpose)
    return Task("code", prompt, f"{head}\n{text}", "\n", closed=True)
