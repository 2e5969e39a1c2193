"""Generated tasks: a prompt and its answer, by kind. Standard library only, a pure function of the random
generator.

Vocabulary
  kind    one word for the task of the prompt ("count", "story", ...); acceptance differs mostly by kind
  exact   the answer is the only right one, so that a greedy reply can be checked against it
  closed  the kind has so few prompts that none can be kept out of the training corpus
"""

from typing import Final

from demo._tasks.code import code
from demo._tasks.lists import copy, edit, sequence
from demo._tasks.numbers import count, math, sort
from demo._tasks.records import log, record
from demo._tasks.talk import chat, story
from demo._tasks.task import Generator

__all__ = ["GENERATORS", "Generator"]

GENERATORS: Final[dict[str, Generator]] = {
    "count": count,
    "copy": copy,
    "sort": sort,
    "math": math,
    "json": record,
    "list": sequence,
    "story": story,
    "chat": chat,
    "edit": edit,
    "log": log,
    "code": code,
}
