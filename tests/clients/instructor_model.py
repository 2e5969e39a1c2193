"""instructor in its default mode, which names one tool: an object, and a stream of parts of one."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel, Field

from tests.clients.place import CITIES, City


class Trip(BaseModel):
    """A trip."""

    cities: list[City] = Field(min_length=1, max_length=3)
    days: int = Field(ge=1, le=9)


def main(url: str, model: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    question = [{"role": "user", "content": "Plan a trip."}]

    trip = client.chat.completions.create(
        model=model, messages=question, response_model=Trip, max_tokens=200, seed=1, max_retries=0
    )
    assert set(trip.cities) <= set(CITIES) and 1 <= trip.days <= 9, trip
    *_, last = client.chat.completions.create_partial(
        model=model, messages=question, response_model=Trip, max_tokens=200, seed=1, max_retries=0
    )
    assert set(last.cities) <= set(CITIES) and 1 <= last.days <= 9, last


if __name__ == "__main__":
    main(*sys.argv[1:])
