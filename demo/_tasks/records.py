"""Tasks with records: JSON and access logs."""

import json
import random
from collections.abc import Callable
from typing import Final

from demo import words as w
from demo._tasks.task import Task, join, length

Record = dict[str, str | int | bool | float]


def _person(rng: random.Random) -> Record:
    return {
        "name": rng.choice(w.NAMES),
        "age": rng.randint(5, 90),
        "city": rng.choice(w.CITIES),
        "job": rng.choice(w.JOBS),
    }


def _product(rng: random.Random) -> Record:
    return {
        "id": rng.randint(1, 999),
        "product": rng.choice(w.OBJECTS),
        "colour": rng.choice(w.COLOURS),
        "price": rng.randint(1, 99) + rng.choice((0.0, 0.5, 0.25, 0.99)),
        "in_stock": rng.random() < 0.7,
    }


def _book(rng: random.Random) -> Record:
    title = f"The {rng.choice(w.ADJECTIVES).title()} {rng.choice(w.ANIMALS + w.JOBS).title()}"
    return {
        "title": title,
        "author": rng.choice(w.NAMES),
        "year": rng.randint(1900, 2025),
        "pages": rng.randint(40, 900),
    }


def _pet(rng: random.Random) -> Record:
    return {
        "pet": rng.choice(w.ANIMALS),
        "name": rng.choice(w.NAMES),
        "age": rng.randint(1, 15),
        "colour": rng.choice(w.COLOURS),
    }


_SCHEMAS: Final[dict[str, Callable[[random.Random], Record]]] = {
    "person": _person,
    "product": _product,
    "book": _book,
    "pet": _pet,
}


def record(rng: random.Random) -> Task:
    """JSON records: from a description, read out, invented or continued."""
    style = rng.random()
    noun = rng.choice(tuple(_SCHEMAS))
    make = _SCHEMAS[noun]
    if style < 0.5:
        row = make(rng)
        keys = [key for key in row if rng.random() < 0.85] or list(row)
        fields = join([f"{key} {row[key]}" for key in keys])
        ask = rng.choice(
            ("Write this as JSON: {}", "Turn this into a JSON record: {}", "Make a JSON object with {}")
        )
        answer = json.dumps({key: row[key] for key in keys})
        return Task(
            "json",
            ask.format(fields.replace("True", "true").replace("False", "false")),
            answer,
            "\n",
            exact=True,
        )
    if style < 0.62:
        row = make(rng)
        key = rng.choice(tuple(row))
        value = row[key]
        prompt = f"What is the {key} in this record? {json.dumps(row)}"
        return Task("json", prompt, json.dumps(value).strip('"'), "\n", exact=True)
    if style < 0.75:
        return Task("json", f"Write a JSON record for a {noun}:", json.dumps(make(rng)), "\n", closed=True)
    n = length(rng, 4, 2, 14, 0.6)
    rows = [make(rng) for _ in range(n)]
    if rng.random() < 0.5:
        first = {"id": 1, **{key: value for key, value in rows[0].items() if key != "id"}}
        rest = [{**first, **row, "id": i} for i, row in enumerate(rows[1:], start=2)]
        lines = [json.dumps(row) for row in rest]
        prompt = f"Continue these JSON records up to id {n}:\n{json.dumps(first)}"
        return Task("json", prompt, "\n".join(lines), "\n")
    prompt = f"Write {n} JSON records for a {noun}, one per line:"
    return Task("json", prompt, "\n".join(json.dumps(row) for row in rows), "\n", closed=True)


def log(rng: random.Random) -> Task:
    """Access-log lines: the clock runs on, ids and durations are free."""
    n = length(rng, 6, 2, 24, 0.6)
    clock_s = rng.randrange(86400)
    day = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    service = rng.choice(("gateway", "scheduler", "worker", "store"))
    lines = []
    for _ in range(n):
        clock_s = (clock_s + rng.choice((0, 0, 1, 1, 1, 2, 3, 7))) % 86400
        stamp = f"{day} {clock_s // 3600:02}:{clock_s // 60 % 60:02}:{clock_s % 60:02}"
        level = rng.choice(("INFO", "INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR"))
        number = rng.randint(100, 999)
        event = {
            "INFO": rng.choice(
                (f"request {number} started", f"request {number} finished in {rng.randint(5, 400)} ms")
            ),
            "DEBUG": f"queue length {rng.randint(0, 40)}",
            "WARNING": f"request {number} is slow, {rng.randint(1, 9)} s so far",
            "ERROR": f"request {number} failed: {rng.choice(('timeout', 'not found', 'connection closed'))}",
        }[level]
        lines.append(f"{stamp} {level} {service}: {event}")
    if rng.random() < 0.5:
        prompt = f"Write {n} log lines of the {service} service, starting at {lines[0][:19]}:"
        return Task("log", prompt, "\n".join(lines), "\n")
    return Task("log", f"Continue this log with {n - 1} lines:\n{lines[0]}", "\n".join(lines[1:]), "\n")
