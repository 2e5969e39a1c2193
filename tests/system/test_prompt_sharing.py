"""A tenant finds what was computed for its own prompts, and for others where the gateway allows it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from laps_sd.stack.local import LocalStack

PROMPT = "The harbour master wrote every ship, its captain and its cargo into the book. " * 12


def found(stack: LocalStack, tenant: str, prompt: str) -> int:
    """Return the cached prompt tokens in the usage of a request."""
    with openai.OpenAI(
        base_url=stack.http_url,
        api_key="none",
        max_retries=0,
        timeout=60,
        default_headers={"laps-sd-tenant": tenant},
    ) as client:
        answer = client.completions.create(model="laps-sd-demo", prompt=prompt, max_tokens=2, seed=1)
    assert answer.usage is not None and answer.usage.prompt_tokens > 128
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


@pytest.fixture(scope="module", params=["false", "true"], ids=["apart", "together"])
def stack(request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    environment = {"LAPS_SD_TRUST_TENANT_METADATA": "true", "LAPS_SD_SHARE_PROMPTS": request.param}
    with LocalStack(engine="fake", slots=2, environment=environment) as stack:
        yield stack


def test_a_tenant_finds_its_own_prompts_and_others_only_where_the_gateway_allows_it(
    stack: LocalStack, request: pytest.FixtureRequest
) -> None:
    shared = "together" in request.node.name

    assert found(stack, "acme", PROMPT) == 0
    assert found(stack, "acme", PROMPT) >= 128
    first = found(stack, "other", PROMPT)
    assert first >= 128 if shared else first == 0
    assert found(stack, "other", PROMPT) >= 128
