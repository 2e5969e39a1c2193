"""The training corpus: generated tasks, the interpreter's own standard library, and plain-text files if there
are any.

Everything is a stream of `Document`s, an endless one per kind, fixed by the seed. Standard library only.
"""

import ast
import gzip
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from demo._tasks.task import is_held_out
from demo._tasks.tools import ToolChat, Turn, call_text, tool_chat
from demo.tasks import GENERATORS, Generator

USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SYSTEM: Final = "<|system|>"
BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
PAD: Final = "<|pad|>"
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

CALLS_BEGIN: Final = "You can call these functions:\n"
CALLS_END: Final = (
    'To call functions, answer with:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n'
)
_CALLS_END_IN_TEMPLATE: Final = CALLS_END.replace("\n", "\\n")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% set first = 1 if tools and messages[0]['role'] == 'system' else 0 %}"
    "{% if tools %}{{ '<|system|>\\n' }}{% if first %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ '"
    + CALLS_BEGIN.replace("\n", "\\n")
    + "' }}{% for tool in tools %}{{ tool['function'] | tojson + '\\n' }}{% endfor %}"
    "{{ '" + _CALLS_END_IN_TEMPLATE + "' }}{% endif %}"
    "{% for message in messages[first:] %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}{% endfor %}{{ eos_token + '\\n' }}"
    "{% elif message['role'] == 'tool' %}{{ '<|user|>\\nResult: ' + message['content'] + '\\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# Shares of the training tokens by kind, relative to one another; "source" is standard library code, "prose" docstrings
# and text files, "tools" chats with functions.
TOKEN_SHARES: Final[dict[str, float]] = {
    "count": 0.13,
    "copy": 0.14,
    "sort": 0.13,
    "math": 0.12,
    "json": 0.08,
    "list": 0.10,
    "story": 0.07,
    "chat": 0.03,
    "edit": 0.10,
    "log": 0.03,
    "code": 0.04,
    "tools": 0.18,
    "prose": 0.06,
    "source": 0.01,
}

_SYSTEM_PROMPTS: Final = ("You are a helpful assistant.", "You are a small demo model.", "Answer briefly.")
_PLAIN_PUNCTUATION: Final[dict[int, str]] = {
    ord(fancy): plain for fancy, plain in zip("“”‘’—–", ('"', '"', "'", "'", "--", "-"), strict=True)
}
_CHAT_SHARE: Final = 0.5
_MAX_DOCUMENT_CHARS: Final = 2000
_HELD_OUT_TEXT_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class Document:
    """`prompt` is context, `completion` is what the model learns to write; the end token follows it."""

    kind: str
    prompt: str
    completion: str


def _task_documents(
    kind: str, generate: Generator, rng: random.Random, *, held_out: bool
) -> Iterator[Document]:
    while True:
        task = generate(rng)
        if not task.closed and task.held_out != held_out:
            continue
        if rng.random() >= _CHAT_SHARE:
            yield Document(kind, BOS + task.prompt, task.separator + task.answer)
            continue
        prompt = BOS
        if rng.random() < 0.15:
            prompt += f"{SYSTEM}\n{rng.choice(_SYSTEM_PROMPTS)}\n"
        if rng.random() < 0.15:  # a turn before this one, so that a second question is nothing new
            before = generate(rng)
            if len(before.answer) < 300 and (before.closed or before.held_out == held_out):
                prompt += f"{USER}\n{before.prompt}\n{ASSISTANT}\n{before.answer}{EOS}\n"
        yield Document(kind, f"{prompt}{USER}\n{task.prompt}\n{ASSISTANT}\n", task.answer)


def message_text(turn: Turn) -> str:
    """What stands after the role of a message."""
    if turn.role == "tool":
        return f"Result: {turn.text}\n"
    if turn.role != "assistant":
        return f"{turn.text}\n"
    return "\n".join((*([turn.text] if turn.text else []), *map(call_text, turn.calls)))


def tool_prompt(tool_chat: ToolChat) -> str:
    """The prompt of a chat with tools, as the chat template renders it."""
    turns, text = list(tool_chat.turns), BOS
    if tool_chat.functions:
        begin = f"{turns.pop(0).text}\n\n" if turns[0].role == "system" else ""
        listed = "".join(f"{json.dumps(function)}\n" for function in tool_chat.functions)
        text += f"{SYSTEM}\n{begin}{CALLS_BEGIN}{listed}{CALLS_END}"
    for turn in turns:
        role = {"system": SYSTEM, "assistant": ASSISTANT}.get(turn.role, USER)
        text += f"{role}\n{message_text(turn)}" + (f"{EOS}\n" if turn.role == "assistant" else "")
    return f"{text}{ASSISTANT}\n"


def _tool_documents(rng: random.Random, *, held_out: bool) -> Iterator[Document]:
    while True:
        example = tool_chat(rng)
        if is_held_out(example.question) == held_out:
            yield Document("tools", tool_prompt(example), message_text(example.answer))


def _standard_library() -> tuple[list[str], list[str]]:
    """Functions, and docstring paragraphs, of the running interpreter's pure Python modules, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions: list[str] = []
    paragraphs: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "lib2to3", "idlelib"} & set(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    flat = " ".join(paragraph.split())
                    if flat.isascii() and 60 <= len(flat) <= 1200 and ">>>" not in flat and flat[0].isupper():
                        paragraphs.append(flat)
            if isinstance(node, ast.FunctionDef):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if source.isascii() and 40 <= len(source) <= _MAX_DOCUMENT_CHARS:
                    functions.append(source)
    return functions, paragraphs


def _text_paragraphs(folder: Path) -> list[str]:
    """Paragraphs of every .txt and .txt.gz file; neighbours are joined so that long documents occur too."""
    paragraphs: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".txt.gz"):
            text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        elif path.suffix == ".txt":
            text = path.read_text(encoding="utf-8", errors="replace")
        else:
            continue
        text = text.translate(_PLAIN_PUNCTUATION)
        pending = ""
        rng = random.Random(path.name)
        wanted_chars = 0
        for paragraph in re.split(r"\r?\n\s*\r?\n", text):
            lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
            verse = bool(lines) and sum(map(len, lines)) < 45 * len(lines)
            flat = ("\n" if verse else " ").join(lines)
            if len(flat) < 3 or not any(c.islower() for c in flat) or flat.startswith(("[", "<", "{{")):
                continue
            pending = f"{pending}\n\n{flat}" if pending else flat
            if len(pending) >= wanted_chars:
                paragraphs.append(pending[:_MAX_DOCUMENT_CHARS])
                pending = ""
                wanted_chars = rng.choice((30, 60, 150, 400, 800))
    return paragraphs


def _split_held_out(texts: list[str], *, held_out: bool) -> list[str]:
    return [text for i, text in enumerate(texts) if (i % _HELD_OUT_TEXT_EVERY == 0) == held_out]


def _text_documents(kind: str, texts: list[str], rng: random.Random) -> Iterator[Document]:
    while True:
        rng.shuffle(texts)
        for text in texts:
            yield Document(kind, BOS, text)


class Corpus:
    """`streams[kind]` yields documents without end."""

    def __init__(self, seed: int, text_folder: Path | None = None, *, held_out: bool = False) -> None:
        functions, paragraphs = _standard_library()
        if text_folder is not None:
            paragraphs = paragraphs[::3] + _text_paragraphs(text_folder)
        sources = {"source": functions, "prose": paragraphs}
        self.streams: dict[str, Iterator[Document]] = {}
        for kind in TOKEN_SHARES:
            rng = random.Random(f"{seed}/{kind}/{held_out}")
            if kind in sources:
                texts = _split_held_out(sources[kind], held_out=held_out)
                self.streams[kind] = _text_documents(kind, texts, rng)
            elif kind == "tools":
                self.streams[kind] = _tool_documents(rng, held_out=held_out)
            else:
                self.streams[kind] = _task_documents(kind, GENERATORS[kind], rng, held_out=held_out)
