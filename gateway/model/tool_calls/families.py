"""The families of models that call tools, by the names that the setting has for them."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from gateway.model.tool_calls import hermes, llama, mistral, tagged
from gateway.model.tool_calls.hermes import HermesReader
from gateway.model.tool_calls.llama import LlamaReader
from gateway.model.tool_calls.mistral import MistralReader
from gateway.model.tool_calls.parameters import Schema
from gateway.model.tool_calls.plain import PlainReader
from gateway.model.tool_calls.reader import ToolReader
from gateway.model.tool_calls.tagged import GLM, QWEN_CODER, TaggedReader, Tags

__all__ = ["FAMILIES", "ToolFamily", "family_of"]


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How the models of one family write calls."""

    name: str
    reader: Callable[[Mapping[str, Schema]], ToolReader]
    """Makes the reader of one output, from the names of the tools with the schemas of their arguments."""
    arguments_key: str = "arguments"
    markers: tuple[str, ...] = ()
    """Markup that a tokenizer may have as special tokens."""
    before: str = ""
    """Markup before each call, or before the list of them."""
    after: str = ""
    as_list: bool = False
    """Several calls are one JSON list."""
    between: str = ""
    tags: Tags | None = None
    """Markup inside a call. None: a call is a JSON object."""
    short_ids: bool = False
    """Ids of calls are nine letters and digits: the templates of Mistral's models refuse others."""

    def id_of(self, request_id: str, index: int) -> str:
        """Return the id of a call of a request: the same whenever the output is read again."""
        digest = hashlib.sha256(f"{request_id} {index}".encode())
        if not self.short_ids:
            return f"call_{digest.hexdigest()[:24]}"
        number, letters = int.from_bytes(digest.digest()), string.ascii_letters + string.digits
        return "".join(letters[number // len(letters) ** place % len(letters)] for place in range(9))


FAMILIES: Mapping[str, ToolFamily] = {
    family.name: family
    for family in (
        ToolFamily(
            "hermes",
            HermesReader,
            markers=(hermes.BEGIN, hermes.END),
            before=f"{hermes.BEGIN}\n",
            after=f"\n{hermes.END}",
            between="\n",
        ),
        ToolFamily(
            "llama3_json", LlamaReader, arguments_key="parameters", markers=(llama.TAG,), between="; "
        ),
        ToolFamily(
            "mistral",
            MistralReader,
            markers=(mistral.BEGIN, mistral.ARGS, mistral.CALL_ID),
            before=mistral.BEGIN,
            as_list=True,
            short_ids=True,
        ),
        ToolFamily(
            "qwen3_coder",
            partial(TaggedReader, tags=QWEN_CODER),
            markers=(tagged.BEGIN, tagged.END, *QWEN_CODER.markers()),
            before=f"{tagged.BEGIN}\n",
            after=f"\n{tagged.END}",
            between="\n",
            tags=QWEN_CODER,
        ),
        ToolFamily(
            "glm45",
            partial(TaggedReader, tags=GLM),
            markers=(tagged.BEGIN, tagged.END, *GLM.markers()),
            before=tagged.BEGIN,
            after=tagged.END,
            between="\n",
            tags=GLM,
        ),
        ToolFamily("json", PlainReader, as_list=True),
    )
}


def family_of(template: str) -> ToolFamily:
    """Return the family whose markup a chat template mentions; plain JSON if it mentions none."""
    if hermes.BEGIN in template:
        if QWEN_CODER.key[0] in template:
            return FAMILIES["qwen3_coder"]
        return FAMILIES["glm45" if GLM.key[0] in template else "hermes"]
    if mistral.BEGIN in template:
        return FAMILIES["mistral"]
    if llama.TAG in template or '"parameters": dictionary' in template:
        return FAMILIES["llama3_json"]
    return FAMILIES["json"]
