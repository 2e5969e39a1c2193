"""Stories and chat."""

import random
from typing import Final

from demo import words as w
from demo._tasks.phrases import article, plural
from demo._tasks.task import Task


def _story_text(rng: random.Random, hero: str, is_name: bool, home: str) -> str:
    """A short tale with a quest, a helper and an end; every later sentence reuses what the earlier ones
    named."""
    place, goal_place = home, rng.choice([other for other in w.PLACES if other != home])
    thing, look = rng.choice(w.OBJECTS), rng.choice(w.LOOKS)
    helper_kind = rng.choice([animal for animal in w.ANIMALS if animal != hero])
    helper = rng.choice(w.NAMES)
    trait = rng.choice(w.ADJECTIVES)
    if is_name:
        subject, pronoun = hero, "she" if hero in w.FEMALE else "he"
        born = f"there was {article(trait)} {'girl' if hero in w.FEMALE else 'boy'} named {hero}"
    else:
        subject, pronoun = f"the {hero}", "it"
        born = f"there was {article(trait)} {hero}"
    their = {"she": "her", "he": "his", "it": "its"}[pronoun]
    upper, pro = subject[0].upper() + subject[1:], pronoun.title()
    opening = rng.choice(("Once upon a time", "Long ago", "One day"))
    fruit, food = plural(rng.choice(w.FRUITS)), rng.choice(w.FOODS)
    sentences = [f"{opening} {born} who lived near the {place}."]
    habits = [
        f"{pro} loved to {rng.choice(w.VERBS)} and {rng.choice(w.VERBS)} near the {place}.",
        f"Every {rng.choice(('morning', 'evening', 'day', 'summer'))} {subject} ate {food} with {fruit}.",
        f"{upper} was {rng.choice(w.ADJECTIVES)}, but never {rng.choice(w.ADJECTIVES)}.",
    ]
    sentences += rng.sample(habits, rng.choice((0, 1, 1, 2)))
    ending = rng.choice(
        (f"{upper} was happy and went home.", "They all lived happily ever after.", "The end.")
    )
    if rng.random() < 0.25:
        return " ".join([*sentences, ending])
    sentences += [
        f"{upper} had {article(look)} {thing} that {pronoun} loved very much.",
        f"But one day the {thing} was gone.",
    ]
    for search_place in rng.sample(w.PLACES, rng.choice((0, 1, 1, 2, 3))):
        sentences.append(f"{upper} looked near the {search_place}, but the {thing} was not there.")
    sentences.append(f"{upper} was very {rng.choice(('sad', 'worried', 'angry', 'tired'))}.")
    if rng.random() < 0.2:
        return " ".join([*sentences, f"And {subject} never saw {their} {thing} again."])
    sentences.append(f"Then {subject} met {article(rng.choice(w.ADJECTIVES))} {helper_kind} named {helper}.")
    if rng.random() < 0.6:
        sentences += [
            f'"Why are you so sad?" asked the {helper_kind}.',
            f'"I have lost my {thing}," said {subject}.',
            f'"I saw it near the {goal_place}," said {helper}.',
        ]
    sentences.append(f"So they went to the {goal_place} together.")
    if rng.random() < 0.4:
        sentences.append(
            f"The way was {rng.choice(('long', 'dark', 'cold', 'steep'))}, but {helper} was not afraid."
        )
    hiding = rng.choice([other for other in w.OBJECTS if other != thing])
    sentences.append(f"There they found the {thing} under {article(rng.choice(w.LOOKS))} {hiding}.")
    if rng.random() < 0.5:
        sentences += [
            f'"Thank you, {helper}," said {subject}.',
            f"{upper} gave the {helper_kind} some {food}.",
        ]
    sentences.append(rng.choice((f"From that day on {subject} and {helper} were friends.", ending)))
    return " ".join(sentences)


def story(rng: random.Random) -> Task:
    """Return a tale that the prompt requests or begins."""
    is_name = rng.random() < 0.5
    hero = rng.choice(w.NAMES if is_name else w.ANIMALS)
    home = rng.choice(w.PLACES)
    text = _story_text(rng, hero, is_name, home)
    if rng.random() < 0.35:
        cut = text.index(" there was")
        if rng.random() < 0.7:
            cut = text.index(" who lived")
        return Task("story", text[:cut], text[cut + 1 :], closed=cut < 20)
    about = hero if is_name else article(hero)
    ask = rng.choice(
        ("Tell me a story about {}.", "Write a short story about {}.", "Tell me about {} near the {}.")
    )
    return Task("story", ask.format(about, home), text, "\n")


_GREETINGS: Final = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye!", "Goodbye!"),
    ("Who are you?", "I am the small demo model of LAPS-SD."),
    ("What is your name?", "I am the small demo model of LAPS-SD."),
    ("What can you do?", "I can count, copy, sort, write small records and tell short stories."),
    ("Help", "Ask me to count, to copy, to sort, to write a record or to tell a short story."),
    ("What is LAPS-SD?", "LAPS-SD serves language models with speculative decoding."),
    (
        "What is speculative decoding?",
        "A small draft model proposes tokens and the target model verifies them in one pass.",
    ),
    ("Tell me a joke.", "Why did the hen cross the road? To get to the other side."),
)


def chat(rng: random.Random) -> Task:
    """Greetings and small facts, each with one answer."""
    topic = rng.random()
    if topic < 0.35:
        question, answer = rng.choice(_GREETINGS)
        return Task("chat", question, answer, "\n", exact=True, closed=True)
    if topic < 0.55:
        country, city = rng.choice(tuple(w.CAPITALS.items()))
        ask = rng.choice(("What is the capital of {}?", "Tell me the capital of {}."))
        return Task(
            "chat", ask.format(country), f"The capital of {country} is {city}.", exact=True, closed=True
        )
    if topic < 0.75:
        word, opposite = rng.choice(tuple(w.OPPOSITES.items()))
        if rng.random() < 0.5:
            word, opposite = opposite, word
        answer = f"The opposite of {word} is {opposite}."
        return Task("chat", f"What is the opposite of {word}?", answer, exact=True, closed=True)
    if topic < 0.88:
        animal, sound = rng.choice(tuple(w.SOUNDS.items()))
        return Task(
            "chat",
            f"What does {article(animal)} say?",
            f"{article(animal).capitalize()} says {sound}.",
            exact=True,
            closed=True,
        )
    thing, colour = rng.choice(tuple(w.THING_COLOURS.items()))
    answer = f"{thing[0].upper() + thing[1:]} is {colour}."
    return Task("chat", f"What colour is {thing}?", answer, exact=True, closed=True)
