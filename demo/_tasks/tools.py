"""Chats with tools: questions that need a call, calls with their results, and questions that need none."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from demo import words as w
from demo._tasks.lists import copy
from demo._tasks.numbers import count, math, sort
from demo._tasks.phrases import sentence
from demo._tasks.talk import chat

Schema = dict[str, Any]
Function = dict[str, Any]
Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: the role, its text, and the calls that the assistant makes in it."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolChat:
    """Functions as OpenAI's API has them, the messages so far, and the assistant's next message."""

    functions: tuple[Function, ...]
    turns: tuple[Turn, ...]
    answer: Turn

    @property
    def question(self) -> str:
        """The first message of the user, which decides whether the chat is held out."""
        return next(turn.text for turn in self.turns if turn.role == "user")


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of one function."""

    function: Function
    question: str
    arguments: tuple[Schema, ...]  # of every call, in order
    results: tuple[str, ...]
    reply: str


def _invented(rng: random.Random) -> str:
    syllables = (
        "".join(rng.choice(part) for part in ("bdfgklmnprstv", "aeiou")) for _ in range(rng.randint(2, 4))
    )
    return "".join(syllables) + rng.choice(("", "", "n", "s", "r"))


def _place(rng: random.Random) -> str:
    return _invented(rng).title() if rng.random() < 0.3 else rng.choice((*w.CITIES, *w.CAPITALS.values()))


def _person(rng: random.Random) -> str:
    return _invented(rng).title() if rng.random() < 0.2 else rng.choice(w.NAMES)


def _words(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.4:
        return f"{rng.choice((*w.COLOURS, *w.ADJECTIVES))} {rng.choice((*w.ANIMALS, *w.OBJECTS))}s"
    if style < 0.6:
        return f"{rng.choice(w.FOODS)} in {_place(rng)}"
    if style < 0.8:
        return f"{rng.choice(w.JOBS)} jobs near {_place(rng)}"
    return " ".join(rng.sample(w.WORDS, rng.randint(1, 4)))


def _function(
    rng: random.Random, name: str, purpose: str, properties: dict[str, Schema], *, vary: bool = True
) -> Function:
    """The function with its schema, written as one of the clients in use writes it.

    Names vary, so that a model copies the name that it is given.
    """
    if vary and rng.random() < 0.35:
        name = rng.choice(("", "", "my_", "fetch_", "do_", "api_")) + name
        name += rng.choice(("", "_tool", "_now", "_v2", "_service", "_for_user", f"_{rng.choice(w.WORDS)}"))
    required = list(properties)
    if rng.random() < 0.25:  # Pydantic's titles
        properties = {
            key: {"title": key.replace("_", " ").title(), **value} for key, value in properties.items()
        }
    parts: list[tuple[str, Any]] = [("type", "object"), ("properties", properties), ("required", required)]
    if rng.random() < 0.35:
        parts = [*parts[1:], parts[0]]
    if rng.random() < 0.3:
        title = rng.choice((name, f"{name}_args", name.title().replace("_", ""), f"{name.title()}Input"))
        parts.insert(rng.randint(0, len(parts)), ("title", title))
    if rng.random() < 0.25:
        parts.append(("additionalProperties", False))
    if rng.random() < 0.1:
        purpose = ""
    return {"name": name, "description": purpose, "parameters": dict(parts)}


def _text(rng: random.Random, about: str, value: str = "", others: tuple[str, ...] = ()) -> Schema:
    """The schema of a text; with others, at times the list of what is allowed, which holds the value."""
    if others and rng.random() < 0.25:
        allowed = list(dict.fromkeys((value, *rng.sample(others, rng.randint(1, 4)))))
        rng.shuffle(allowed)
        return {"enum": allowed} if rng.random() < 0.5 else {"type": "string", "enum": allowed}
    described = {"description": about} if rng.random() < 0.4 else {}
    return {"type": "string", **described} if rng.random() < 0.7 else {**described, "type": "string"}


def _number(rng: random.Random, about: str) -> Schema:
    kind = rng.choice(("integer", "number"))
    return {"type": kind, "description": about} if rng.random() < 0.4 else {"type": kind}


def _weather(rng: random.Random) -> _Use:
    name = rng.choice(
        ("weather", "weather", "get_weather", "get_current_weather", "weather_report", "forecast")
    )
    key = rng.choice(("city", "city", "location", "place"))
    purpose = rng.choice(
        (
            "Return the weather of a city.",
            "Get the current weather.",
            "The weather in a city",
            "Look up the weather.",
        )
    )
    several = rng.choice((2, 2, 3)) if rng.random() < 0.3 else 1
    cities = list(dict.fromkeys(_place(rng) for _ in range(several)))
    listed = cities[0] if len(cities) == 1 else f"{', '.join(cities[:-1])} and {cities[-1]}"
    asks = (
        "What is the weather in {}?", "What is the weather in {}?", "What's the weather in {}?", "How is the weather in {}?",
        "What is the weather like in {} today?", "Is it raining in {}?", "Weather in {}?", "Tell me the weather in {}.",
        "How warm is it in {}?", "Will it rain in {} tomorrow?", "Do I need an umbrella in {}?",
    )  # fmt: skip
    schema = _text(rng, "The name of the city", cities[0], tuple(w.CITIES) if len(cities) == 1 else ())
    results = [
        rng.choice((sky, f"{rng.randint(-9, 35)} degrees, {sky}", f"{sky} in {city}"))
        for city in cities
        for sky in (rng.choice(("rain", "sun", "snow", "fog", "wind", "clouds", "sunny", "cloudy")),)
    ]
    reply = " ".join(
        f"The weather in {city}: {result}." for city, result in zip(cities, results, strict=True)
    )
    return _Use(
        _function(rng, name, purpose, {key: schema}),
        rng.choice(asks).format(listed),
        tuple({key: city} for city in cities),
        tuple(results),
        reply,
    )


def _clock(rng: random.Random) -> _Use:
    name = rng.choice(("time", "get_time", "current_time", "local_time"))
    key, city = rng.choice(("city", "place", "location", "timezone")), _place(rng)
    purpose = rng.choice(("Return the time in a city.", "Get the local time.", "The current time of a place"))
    ask = rng.choice(
        (
            "What time is it in {}?",
            "What is the time in {}?",
            "Tell me the time in {}.",
            "How late is it in {}?",
        )
    )
    result = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    schema = _text(rng, "The place", city, tuple(w.CITIES))
    return _Use(
        _function(rng, name, purpose, {key: schema}),
        ask.format(city),
        ({key: city},),
        (result,),
        f"It is {result} in {city}.",
    )


def _calculator(rng: random.Random) -> _Use:
    sign, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    a, b = rng.randint(1, 999), rng.randint(1, 99)
    if sign == "/":
        a *= b
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    expression = f"{a} {sign} {b}"
    ask = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "Calculate {}.",
            "Compute {}.",
            "How much is {}?",
            "{} = ?",
            "Please calculate {}.",
        )
    )
    if rng.random() < 0.65:
        name = rng.choice(("calculator", "calculator", "calculate", "evaluate", "compute"))
        key = rng.choice(("expression", "expression", "formula", "input"))
        purpose = rng.choice(
            ("Evaluate an expression.", "Calculate with numbers.", "A calculator", "Do arithmetic.")
        )
        function = _function(rng, name, purpose, {key: _text(rng, "What to calculate")})
        arguments: Schema = {key: expression}
    else:
        verb = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[sign]
        first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
        function = _function(
            rng,
            rng.choice((verb, f"{verb}_numbers")),
            rng.choice((f"{verb.title()} two numbers.", f"Use this to {verb}.")),
            {first: _number(rng, "The first number"), second: _number(rng, "The second number")},
        )
        arguments = {first: a, second: b}
        if rng.random() < 0.3:
            expression = f"{a} {word} {b}"
    reply = rng.choice((f"{a} {sign} {b} = {result}.", f"The result is {result}."))
    return _Use(function, ask.format(expression), (arguments,), (str(result),), reply)


def _search(rng: random.Random) -> _Use:
    name = rng.choice(("search", "search", "web_search", "search_web", "lookup", "find"))
    key = rng.choice(("query", "query", "text", "terms", "q"))
    purpose = rng.choice(("Search the web.", "Find pages.", "Search for a text.", "Look something up."))
    query = _words(rng)
    ask = rng.choice(
        (
            "Search for {}.",
            "Search for {}",
            "Find {}.",
            "Look up {}.",
            "Search the web for {}.",
            "Can you find {}?",
            "Look for {}.",
        )
    )
    result = sentence(rng)
    return _Use(
        _function(rng, name, purpose, {key: _text(rng, "What to search for")}),
        ask.format(query),
        ({key: query},),
        (result,),
        f"I found this: {result}",
    )


def _timer(rng: random.Random) -> _Use:
    name, minutes = rng.choice(("timer", "set_timer", "start_timer", "alarm")), rng.randint(1, 90)
    key = rng.choice(("minutes", "duration", "minutes", "time"))
    ask = rng.choice(
        (
            "Set a timer for {} minutes.",
            "Start a timer of {} minutes.",
            "Wake me in {} minutes.",
            "Timer: {} minutes",
        )
    )
    return _Use(
        _function(
            rng, name, rng.choice(("Set a timer.", "Start a timer.")), {key: _number(rng, "How many minutes")}
        ),
        ask.format(minutes),
        ({key: minutes},),
        (rng.choice(("ok", "done", "started")),),
        f"The timer runs for {minutes} minutes.",
    )


def _message(rng: random.Random) -> _Use:
    name = rng.choice(("send_message", "send", "send_email", "message"))
    to, body = rng.choice((("to", "text"), ("name", "message"), ("recipient", "body")))
    person, text = (
        _person(rng),
        sentence(rng) if rng.random() < 0.5 else " ".join(rng.sample(w.WORDS, rng.randint(2, 5))),
    )
    ask = rng.choice(
        ("Send {} this message: {}", "Write to {}: {}", "Tell {}: {}", "Send a message to {}: {}")
    )
    return _Use(
        _function(
            rng, name, rng.choice(("Send a message.", "Send a text to a person.")),
            {to: _text(rng, "Who gets it"), body: _text(rng, "The text")},
        ),
        ask.format(person, text),
        ({to: person, body: text},),
        (rng.choice(("sent", "ok", "done")),),
        f"I sent your message to {person}.",
    )  # fmt: skip


def _translate(rng: random.Random) -> _Use:
    name = rng.choice(("translate", "translate_word", "translator"))
    key, language_key = rng.choice((("text", "language"), ("word", "to"), ("text", "target")))
    word = rng.choice(w.WORDS) if rng.random() < 0.7 else " ".join(rng.sample(w.WORDS, 2))
    languages = ("German", "French", "Spanish", "Italian", "Latin", "Polish", "Dutch")
    language, result = rng.choice(languages), _invented(rng)
    ask = rng.choice(
        ("Translate {} into {}.", "Translate {} to {}.", "What is {} in {}?", "How do you say {} in {}?")
    )
    schema = _text(rng, "The language", language, languages)
    return _Use(
        _function(rng, name, "Translate a text.", {key: _text(rng, "The text"), language_key: schema}),
        ask.format(word, language),
        ({key: word, language_key: language},),
        (result,),
        f"{word} in {language} is {result}.",
    )


def _named(rng: random.Random) -> _Use:
    """A function of any name, that the question names with its arguments."""
    verb = rng.choice(
        ("open", "close", "paint", "find", "make", "move", "order", "read", "buy", "play", "show", "count")
    )
    noun = rng.choice((*w.OBJECTS, *w.ANIMALS, *w.FOODS))
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", verb, f"{noun}_{verb}"))
    keys = rng.sample(
        ("colour", "size", "name", "place", "id", "title", "amount", "note", "kind", "date"),
        rng.randint(1, 3),
    )
    arguments: Schema = {}
    properties: dict[str, Schema] = {}
    for key in keys:
        if key in ("size", "id", "amount"):
            arguments[key] = rng.randint(1, 999)
            properties[key] = _number(rng, f"The {key}")
        else:
            pool = {"colour": w.COLOURS, "name": w.NAMES, "place": w.PLACES}.get(key, w.WORDS)
            arguments[key] = rng.choice(pool) if rng.random() < 0.8 else _invented(rng)
            properties[key] = _text(rng, f"The {key}")
    listed = " and ".join(f"{key} {value}" for key, value in arguments.items())
    ask = rng.choice(("Call {} with {}.", "Use {} with {}.", "Please call {} with {}.", "Run {} with {}."))
    result = rng.choice(("ok", "done", str(rng.randint(1, 99)), rng.choice(w.WORDS)))
    return _Use(
        _function(rng, name, f"{verb.title()} the {noun}.", properties, vary=False),
        ask.format(name, listed),
        (arguments,),
        (result,),
        f"The result of {name} is {result}.",
    )


def _without_arguments(rng: random.Random) -> _Use:
    name, purpose, ask, result, reply = rng.choice(
        (
            ("roll_dice", "Roll the dice.", "Roll the dice.", str(rng.randint(1, 6)), "The dice show {}."),
            ("flip_coin", "Flip a coin.", "Flip a coin.", rng.choice(("heads", "tails")), "The coin shows {}."),
            ("today", "Return the day of the week.", "What day is it today?", rng.choice(w.SEQUENCES[0]), "Today is {}."),
            ("get_date", "Get the date.", "What is the date?", f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}", "The date is {}."),
            ("status", "Return the status.", "What is the status?", rng.choice(("ok", "busy", "idle")), "The status is {}."),
        )
    )  # fmt: skip
    parameters: Schema = {"type": "object", "properties": {}}
    if rng.random() < 0.6:
        parameters["additionalProperties"] = False
    function = {"name": name, "description": purpose, "parameters": parameters}
    return _Use(function, ask, ({},), (result,), reply.format(result))


_USES: Final[tuple[tuple[float, Callable[[random.Random], _Use]], ...]] = (
    (4.0, _weather),
    (3.0, _calculator),
    (3.0, _search),
    (1.5, _clock),
    (1.0, _timer),
    (1.5, _message),
    (1.0, _translate),
    (2.5, _named),
    (0.7, _without_arguments),
)


def _makers(rng: random.Random, n: int) -> list[Callable[[random.Random], _Use]]:
    """Return n different makers, so that no two functions serve the same question."""
    left = {make: weight for weight, make in _USES}
    chosen = []
    for _ in range(n):
        (make,) = rng.choices(list(left), list(left.values()))
        del left[make]
        chosen.append(make)
    return chosen


def _instructions(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(("You are a helpful assistant.", "Answer briefly.", "Use the tools."))
    verb = rng.choice(("Answer", "Help with", "Take care of", "You know all"))
    about = rng.choice(("questions", "requests", "tasks", *w.JOBS, *w.PLACES, *w.ANIMALS))
    more = rng.choice(("", "", " Be kind.", " Use tools where they help.", f" {sentence(rng)}"))
    return f"{verb} {about} about the {rng.choice(('weather', 'time', *w.WORDS))}.{more}"


def _called(use: _Use) -> Turn:
    name = use.function["name"]
    return Turn("assistant", "", tuple({"name": name, "arguments": arguments} for arguments in use.arguments))


def tool_chat(rng: random.Random) -> ToolChat:
    """Return a chat whose next message is a call, the reply to a call's result, or an answer without any call."""
    makers = _makers(rng, rng.choice((1, 1, 1, 2, 2, 3)))
    uses = [make(rng) for make in makers]
    use, others = uses[0], uses[1:]
    functions = {each["name"]: each for each in (*(other.function for other in others), use.function)}
    offered = list(functions.values())
    rng.shuffle(offered)
    turns: list[Turn] = []
    if rng.random() < 0.4:
        turns.append(Turn("system", _instructions(rng)))
    style = rng.random()
    if style < 0.25:
        generators = (
            (chat, chat, chat, copy, count, sort)
            if _calculator in makers
            else (chat, chat, copy, count, math)
        )
        task = rng.choice(generators)(rng)
        return ToolChat(tuple(offered), (*turns, Turn("user", task.prompt)), Turn("assistant", task.answer))
    if others and rng.random() < 0.25:  # another function was used before
        before = others[0]
        if functions[before.function["name"]] is before.function:
            turns += [Turn("user", before.question), _called(before)]
            turns += [*(Turn("tool", result) for result in before.results), Turn("assistant", before.reply)]
    begin = rng.choice(("Please use a tool:", "Hello!", "One question.")) + " " if rng.random() < 0.08 else ""
    turns.append(Turn("user", begin + use.question))
    if style < 0.8:
        return ToolChat(tuple(offered), tuple(turns), _called(use))
    turns += [_called(use), *(Turn("tool", result) for result in use.results)]
    shown = () if rng.random() < 0.15 else tuple(offered)
    return ToolChat(shown, tuple(turns), Turn("assistant", use.reply))


def _json(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def call_text(call: Call) -> str:
    """Return a call as Hermes and Qwen write it."""
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n</tool_call>'
