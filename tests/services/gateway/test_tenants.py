"""Keys, tenants and the limits of each."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from multidict import CIMultiDict

from gateway.api.description import openapi_json
from gateway.app import MESSAGES_AT_ONCE
from gateway.settings import GatewaySettings
from gateway.tenant_file import MAX_FILE_BYTES, KeyFile, TenantFileError
from gateway.tenants import Tenants
from laps_sd.client import AsyncClient
from laps_sd.errors import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    StartupError,
    Unauthenticated,
)
from laps_sd.service import metrics
from laps_sd.service.config import ConfigError
from laps_sd.service.keys import digest_of
from laps_sd.v1.inference_pb2 import (
    CancelRequest,
    Cursor,
    DetokenizeRequest,
    ExplainRequest,
    GenerateRequest,
    ListModelsRequest,
    ResumeRequest,
    TokenizeRequest,
)
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import has_retry_info, read_tokens, rest

ACME, OTHER = "laps-sd-" + "a" * 43, "laps-sd-" + "b" * 43
FILE = f"""
[tenants.acme]
keys = ["{digest_of(ACME)}"]
requests_per_minute = 12
concurrent_requests = 2
max_priority = 5

[tenants.other]
keys = ["{digest_of(OTHER)}"]
"""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


def tenants_of(path: Path | None, **changes: Any) -> Tenants:
    return Tenants(GatewaySettings(api_keys_file=path, **changes))


def of(tenants: Tenants, headers: Mapping[str, str]) -> str:
    return tenants.of(headers.items())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestWhoCalls:
    def test_a_key_names_its_tenant(self, key_file: Path) -> None:
        tenants = tenants_of(key_file)

        assert of(tenants, bearer(ACME)) == "acme"
        assert of(tenants, {"authorization": f"bearer  {OTHER}"}) == "other"

    @pytest.mark.parametrize(
        "given", ["", "Bearer", "Bearer ", f"Basic {ACME}", "Bearer x", "Bearer " + "x" * 300]
    )
    def test_without_a_known_key_nobody_gets_in(self, key_file: Path, given: str) -> None:
        with pytest.raises(Unauthenticated):
            of(tenants_of(key_file), {"authorization": given})

    def test_a_wrong_key_is_refused_even_where_none_is_needed(self, key_file: Path) -> None:
        tenants = tenants_of(key_file, anonymous="yes")

        assert of(tenants, {}) == "anonymous"
        with pytest.raises(Unauthenticated):
            of(tenants, bearer("wrong"))

    def test_where_no_keys_are_configured_a_clients_key_means_nothing(self) -> None:
        assert of(tenants_of(None), bearer("sk-whatever")) == "anonymous"

    def test_octets_that_are_no_text_are_no_key_and_no_tenant(self, key_file: Path) -> None:
        """HTTP decodes such bytes as halves of surrogate pairs."""
        with pytest.raises(Unauthenticated, match="not known"):
            of(tenants_of(key_file), bearer("\udcff"))
        with pytest.raises(InvalidArgument, match="printable"):
            of(tenants_of(None, trust_tenant_metadata=True), {"laps-sd-tenant": "a\udcff"})

    def test_headers_of_a_proxy_count_only_where_it_is_trusted(self, key_file: Path) -> None:
        named = {"laps-sd-tenant": "a", "x-llm-d-inference-fairness-id": "b"}

        assert of(tenants_of(None), named) == "anonymous"
        trusting = tenants_of(None, trust_tenant_metadata=True)
        assert of(trusting, named) == "a"
        assert of(trusting, {"x-llm-d-inference-fairness-id": "b"}) == "b"
        assert of(tenants_of(key_file, trust_tenant_metadata=True), named | bearer(ACME)) == "acme"

    @pytest.mark.parametrize("name", ["authorization", "laps-sd-tenant", "x-llm-d-inference-fairness-id"])
    def test_a_header_that_names_the_caller_twice_is_refused(self, name: str) -> None:
        """The first may be the client's and the last the proxy's, or the other way round."""
        tenants = tenants_of(None, trust_tenant_metadata=True)
        for twice in ([(name, "a"), (name, "b")], [(name, "a"), (name.title(), "a")]):
            with pytest.raises(InvalidArgument) as error:
                tenants.of(twice)
            assert error.value.violations == ((name, "must be sent once at most, got it twice"),)

    @pytest.mark.parametrize(
        ("changes", "allowed"),
        [
            ({}, True),
            ({"grpc_host": "::1"}, True),
            ({"grpc_host": "localhost"}, True),
            ({"anonymous": "no", "trust_tenant_metadata": True}, False),
            ({"grpc_host": "0.0.0.0", "anonymous": "yes"}, True),
            ({"grpc_host": "0.0.0.0", "trust_tenant_metadata": True}, False),
            ({"api_keys_file": Path("f")}, False),
        ],
    )
    def test_anonymous_is_who_calls_on_this_machine_or_where_that_is_configured(
        self, changes: Any, allowed: bool
    ) -> None:
        assert GatewaySettings(**changes).allows_anonymous == allowed

    def test_a_gateway_that_anybody_could_call_does_not_start_by_mistake(self) -> None:
        with pytest.raises(
            ConfigError, match=r"LAPS_SD_API_KEYS_FILE must .* or LAPS_SD_ANONYMOUS must be yes"
        ):
            GatewaySettings(grpc_host="0.0.0.0")

    def test_a_gateway_that_nobody_could_call_does_not_start(self) -> None:
        with pytest.raises(ConfigError, match="LAPS_SD_ANONYMOUS=no needs LAPS_SD_API_KEYS_FILE"):
            GatewaySettings(anonymous="no")


class TestTheFile:
    def test_may_begin_with_the_mark_of_an_editor(self, tmp_path: Path) -> None:
        path = tmp_path / "tenants.toml"
        path.write_text("[tenants.acme]", encoding="utf-8-sig")

        assert list(KeyFile.read(path).quotas) == ["acme"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("tenants = 3", "must be tables"),
            ("[tenant.a]", "tenant is not known"),
            ("[tenants.'a b']", "letters, digits"),
            ("[tenants.a]\nkeys = 'x'", "tenants.a.keys must be a list"),
            ("[tenants.a]\nkeys = ['laps-sd-secret']", r"tenants.a.keys\[0\] must be sha256: and 64"),
            (f"[tenants.anonymous]\nkeys = ['{digest_of('x')}']", "must be absent"),
            ("[tenants.a]\nlimit = 3", "tenants.a.limit is not known; there are keys, concurrent_requests"),
            ("[tenants.a]\nconcurrent_requests = 0", "must be a number from 1, got 0"),
            ("[tenants.a]\nrequests_per_minute = nan", "must be a number from 1"),
            ("[tenants.a]\nmax_priority = true", "must be a number from 0"),
            ("[tenants.a]\noperator = 1", "tenants.a.operator must be true or false, got 1"),
            ("[tenants.anonymous]\noperator = true", "tenants.anonymous.operator must be absent"),
            ("nonsense", "Expected"),
        ],
    )
    def test_says_what_is_wrong_with_it_and_no_secret(self, text: str, said: str) -> None:
        with pytest.raises(ValueError, match=said) as error:
            KeyFile.parse(text)
        assert "laps-sd-secret" not in str(error.value)

    def test_two_tenants_cannot_have_one_key(self) -> None:
        with pytest.raises(ValueError, match="acme and twin have the same key"):
            KeyFile.parse(FILE + f'[tenants.twin]\nkeys = ["{digest_of(ACME)}"]')

    def test_that_is_not_there_stops_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(TenantFileError, match=r"cannot be read"):
            KeyFile.read(tmp_path / "none.toml")
        with pytest.raises(StartupError, match=r"LAPS_SD_API_KEYS_FILE: .* cannot be read"):
            tenants_of(tmp_path / "none.toml")

    @pytest.mark.parametrize(
        ("octets", "said"),
        [
            (b"#" * (MAX_FILE_BYTES + 1), "cannot be read: it is larger than 4194304 bytes"),
            (b"[tenants.caf\xe9]", "utf-8"),
        ],
        ids=["large", "not UTF-8"],
    )
    def test_that_is_no_text_of_a_bounded_size_is_refused(
        self, tmp_path: Path, octets: bytes, said: str
    ) -> None:
        path = tmp_path / "tenants.toml"
        path.write_bytes(octets)

        with pytest.raises(TenantFileError, match=said):
            KeyFile.read(path)

    def test_is_read_again_when_it_changes_and_kept_when_it_breaks(self, key_file: Path) -> None:
        tenants = tenants_of(key_file)
        assert not tenants.maybe_reload()

        key_file.write_text("[tenants.a]\nkeys = 'broken'")
        assert not tenants.maybe_reload()
        assert of(tenants, bearer(ACME)) == "acme"

        key_file.write_text(FILE.replace(digest_of(ACME), digest_of("new")))
        assert tenants.maybe_reload()
        assert of(tenants, bearer("new")) == "acme"
        with pytest.raises(Unauthenticated):
            of(tenants, bearer(ACME))

    def test_is_read_again_where_a_copy_has_the_size_and_the_time_of_the_file_before(
        self, key_file: Path
    ) -> None:
        tenants = tenants_of(key_file)
        before = key_file.stat()

        key_file.write_text(FILE.replace(digest_of(ACME), digest_of("new")))
        os.utime(key_file, ns=(before.st_atime_ns, before.st_mtime_ns))

        assert key_file.stat().st_size == before.st_size
        assert tenants.maybe_reload()
        assert of(tenants, bearer("new")) == "acme"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TestLimits:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def limited(self, key_file: Path, clock: Clock) -> Tenants:
        """Return limits where "acme" has 12 requests a minute: two at once, then one in five seconds."""
        return Tenants(GatewaySettings(api_keys_file=key_file), clock)

    def test_a_burst_then_a_steady_rate(self, limited: Tenants, clock: Clock) -> None:
        def call(now_s: float, tenant: str = "acme") -> float | None:
            """Return None when the call is accepted, else the time after which to retry."""
            clock.now_s = now_s
            try:
                with limited.admitted(tenant, 1, new=True):
                    return None
            except ResourceExhausted as error:
                return error.retry_after_s

        assert [call(0), call(0)] == [None, None]
        assert call(0) == pytest.approx(5)
        assert call(5) is None
        assert call(5, "other") is None
        assert call(9) == pytest.approx(1)
        assert [call(60), call(60)] == [None, None]
        assert call(60) is not None

    def test_calls_that_are_refused_together_are_advised_times_one_after_the_other(
        self, limited: Tenants
    ) -> None:
        advice = []
        for _ in range(20):
            try:
                with limited.admitted("acme", 1, new=True):
                    pass
            except ResourceExhausted as error:
                advice.append(error.retry_after_s)

        assert advice[:11] == [pytest.approx(5.0 * turn) for turn in range(1, 12)]
        assert set(advice[11:]) == {60.0}, "no longer than a minute"

    def test_calls_beyond_the_open_ones_are_advised_by_how_long_streams_last(
        self, limited: Tenants, clock: Clock
    ) -> None:
        for _ in range(200):  # streams of ten seconds, two at a time
            with limited.admitted("acme", 2, new=False):
                clock.now_s += 10.0
        with limited.admitted("acme", 2, new=False):
            for turn in (1, 2, 3):
                with pytest.raises(ResourceExhausted) as error:
                    limited.admitted("acme", 1, new=False).__enter__()
                assert error.value.retry_after_s == pytest.approx(5.0 * turn, rel=0.01)

    def test_calls_that_make_no_request_have_a_rate_too(self, limited: Tenants, clock: Clock) -> None:
        with limited.admitted("acme", 2, new=True):
            pass  # the requests that may come at once
        for _ in range(20):
            limited.charge_call("acme")
        with pytest.raises(ResourceExhausted, match="may make 120 calls a minute") as error:
            limited.charge_call("acme")
        assert error.value.retry_after_s == pytest.approx(0.5)
        limited.charge_call("other")
        clock.now_s += 0.5
        limited.charge_call("acme")

    def test_each_output_counts_and_one_large_call_may_run_ahead(
        self, limited: Tenants, key_file: Path
    ) -> None:
        key_file.write_text("[tenants.acme]\nrequests_per_minute = 60")
        limited.maybe_reload()
        with limited.admitted("acme", 16, new=True):
            pass

        with pytest.raises(ResourceExhausted) as error, limited.admitted("acme", 1, new=True):
            pass
        assert error.value.retry_after_s == pytest.approx(7)  # six of debt, one for itself

    def test_so_many_may_be_open_at_once(self, limited: Tenants) -> None:
        with limited.admitted("acme", 1, new=False):
            with pytest.raises(ResourceExhausted, match=r"has 1 requests open .* may have 2"):
                limited.admitted("acme", 2, new=False).__enter__()
            with limited.admitted("acme", 1, new=False), limited.admitted("other", 9, new=True):
                pass
        with limited.admitted("acme", 2, new=False):
            pass

    def test_more_than_may_ever_be_open_is_refused_for_good(self, key_file: Path) -> None:
        tenants = tenants_of(key_file)
        with pytest.raises(
            InvalidArgument, match="n must be at most 2 outputs of one call for tenant 'acme', got 3"
        ):
            tenants.admitted("acme", 3, new=True).__enter__()

    def test_a_priority_above_the_tenants_is_denied(self, key_file: Path) -> None:
        tenants = tenants_of(key_file)
        tenants.check_priority("acme", 5)
        tenants.check_priority("other", 100)
        with pytest.raises(PermissionDenied, match="at most 5 for tenant 'acme', got 6"):
            tenants.check_priority("acme", 6)


class TestOverTheWire:
    @pytest.fixture
    async def keyed(self, scheduler: FakeScheduler, start_gateway: StartGateway, key_file: Path) -> Running:
        started: Running = await start_gateway(
            scheduler.address, http_port=0, api_keys_file=key_file, trust_tenant_metadata=False
        )
        await asyncio.wait_for(started.link.greeted.wait(), 10)
        return started

    async def test_a_key_in_the_metadata_names_the_tenant_of_a_request(
        self, keyed: Running, scheduler: FakeScheduler
    ) -> None:
        before = metrics.value("laps_sd_gateway_tenant_output_tokens_total", {"tenant": "other"})
        call = keyed.stub.GenerateStream(
            GenerateRequest(text="x"), metadata=(("authorization", f"Bearer {OTHER}"),)
        )
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, [70, 71, 72], Kind.KIND_LENGTH)
        await rest(call)

        assert scheduler.record.requests[request_id].submit.tenant == "other"
        after = metrics.value("laps_sd_gateway_tenant_output_tokens_total", {"tenant": "other"})
        assert after - before == 3

    @pytest.mark.parametrize("again", ["resumes", "has the same key"])
    async def test_tokens_count_whichever_stream_passes_them(
        self, running: Running, scheduler: FakeScheduler, again: str
    ) -> None:
        """As after the death of a gateway. Tokens before the cursor are passed to nobody."""
        names = ("laps_sd_gateway_output_tokens_total", "laps_sd_gateway_tenant_output_tokens_total")

        def counted() -> list[float]:
            return [metrics.value(names[0], {}), metrics.value(names[1], {"tenant": "anonymous"})]

        before = counted()
        request = GenerateRequest(text="x", idempotency_key="mine")
        call = running.stub.GenerateStream(request)
        request_id = await scheduler.submitted()
        if again == "resumes":
            scheduler.commit(request_id, [70, 71, 72])
            await read_tokens(call, 3)
        call.cancel()
        await wait_until_async(lambda: not len(running.link.streams), description="no stream", every_s=0.005)
        scheduler.commit(request_id, [73, 74], Kind.KIND_LENGTH)
        if again == "resumes":
            cursor = Cursor(next_token=3, text_offset=3)
            await rest(running.stub.Resume(ResumeRequest(request_id=request_id, cursor=cursor)))
        else:
            await rest(running.stub.GenerateStream(request))

        expected = 5 if again == "resumes" else 2
        assert [after - earlier for after, earlier in zip(counted(), before, strict=True)] == [expected] * 2

    async def test_messages_of_a_tenant_are_received_a_few_at_a_time_and_delay_no_other_tenant(
        self, running: Running
    ) -> None:
        """150 messages of 4 MiB that lacked their last byte took 610 MiB, whatever calls a tenant may have open."""
        method = running.channel.stream_stream(
            "/laps_sd.v1.Inference/GenerateStream", request_serializer=GenerateRequest.SerializeToString
        )

        def call(tenant: str) -> Any:
            return method(metadata=(("laps-sd-tenant", tenant),))

        turns = running.gateway.message_turns._of_tenants
        held = [call("hostile") for _ in range(MESSAGES_AT_ONCE)]
        await wait_until_async(
            lambda: "hostile" in turns and not turns["hostile"]._free, description="all have begun"
        )
        large = GenerateRequest(text="x" * 2**20)
        waits, other = call("hostile"), call("other")
        sending = asyncio.create_task(waits.write(large))
        await other.write(large)
        refused = grpc.StatusCode.INVALID_ARGUMENT  # a prompt that long does not fit
        assert await other.code() is refused
        assert not sending.done(), "of what no one reads, little is received"

        held[0].cancel()
        await sending
        assert await waits.code() is refused
        for each in held:
            each.cancel()
        await wait_until_async(lambda: not turns, description="nothing is kept of the tenants")

    async def test_the_python_client_sends_its_key(self, keyed: Running) -> None:
        address = f"127.0.0.1:{keyed.gateway.app.port}"
        async with AsyncClient(address, api_key=ACME) as client:
            assert [model.name for model in await client.models()] == ["tiny"]
        async with AsyncClient(address, api_key="wrong") as client:
            with pytest.raises(Unauthenticated):
                await client.models()

    async def test_every_path_but_the_open_ones_takes_a_key_in_either_header(self, keyed: Running) -> None:
        assert keyed.gateway.http is not None
        url = f"http://127.0.0.1:{keyed.gateway.http.port}"
        calls = {
            (method.upper(), path.replace("{name}", "tiny").replace("{id}", "s0.x")): call.get("security")
            != []
            for path, item in json.loads(openapi_json())["paths"].items()
            for method, call in item.items()
            if method in ("get", "post")
        }
        assert sum(calls.values()) > 10

        async with aiohttp.ClientSession() as session:

            async def refused(method: str, path: str, headers: dict[str, str]) -> bool:
                body = None if method == "GET" else {}
                async with session.request(method, url + path, headers=headers, json=body) as response:
                    return response.status == 401

            for (method, path), needs_key in calls.items():
                assert await refused(method, path, {}) == needs_key, path
                assert await refused(method, path, {"x-api-key": "wrong"}) == needs_key, path
                assert not await refused(method, path, {"x-api-key": ACME}), path
                assert not await refused(method, path, bearer(ACME)), path

    async def test_without_a_key_no_call_of_grpc_gets_in(self, keyed: Running) -> None:
        for call in (
            keyed.stub.GenerateStream(GenerateRequest(text="x")),
            keyed.stub.ListModels(ListModelsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await (call if not hasattr(call, "read") else rest(call))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_without_a_key_reflection_is_refused_before_it_reads_a_request(
        self, keyed: Running
    ) -> None:
        # A client that writes while it is refused may see INTERNAL instead: grpcio reports the failed write first.
        stub = reflection_pb2_grpc.ServerReflectionStub(keyed.channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ServerReflectionInfo().read()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_with_a_key_reflection_lists_the_services(self, keyed: Running) -> None:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(keyed.channel)
        metadata = (("authorization", f"Bearer {ACME}"),)
        answer = await stub.ServerReflectionInfo(iter([asked]), metadata=metadata).read()
        assert {one.name for one in answer.list_services_response.service} == {
            "laps_sd.v1.Inference",
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }

    @pytest.mark.parametrize(
        "asked",
        [
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="laps_sd.v1.Inference"),
            reflection_pb2.ServerReflectionRequest(file_by_filename="laps_sd/v1/inference.proto"),
            reflection_pb2.ServerReflectionRequest(file_by_filename="laps_sd/v1/gateway_link.proto"),
        ],
        ids=["symbol", "file", "imported file"],
    )
    async def test_with_a_key_reflection_describes_them(
        self, keyed: Running, asked: reflection_pb2.ServerReflectionRequest
    ) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(keyed.channel)
        metadata = (("authorization", f"Bearer {ACME}"),)
        answer = await stub.ServerReflectionInfo(iter([asked]), metadata=metadata).read()
        assert answer.file_descriptor_response.file_descriptor_proto

    @pytest.mark.parametrize("name", ["authorization", "laps-sd-tenant"])
    async def test_two_tenants_of_one_call_are_refused_alike_by_grpc_and_http(
        self, start_gateway: StartGateway, scheduler: FakeScheduler, name: str
    ) -> None:
        gateway: Running = await start_gateway(scheduler.address, http_port=0)
        assert gateway.gateway.http is not None
        twice = [(name, "Bearer a"), (name, "Bearer b")]
        sentence = f"{name} must be sent once at most, got it twice"

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await gateway.stub.Generate(GenerateRequest(text="x"), metadata=tuple(twice))
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{gateway.gateway.http.port}/v1/completions",
                json={"prompt": "x"},
                headers=CIMultiDict(twice),
            ) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"]["message"] == sentence

        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details() == sentence
        assert not scheduler.record.requests

    async def test_calls_that_make_no_request_cost_the_tenants_rate(
        self, keyed: Running, key_file: Path
    ) -> None:
        await asyncio.to_thread(
            key_file.write_text, f'[tenants.acme]\nkeys = ["{digest_of(ACME)}"]\nrequests_per_minute = 1'
        )
        keyed.gateway.tenants.maybe_reload()
        metadata = (("authorization", f"Bearer {ACME}"),)
        calls = (
            lambda: keyed.stub.Cancel(CancelRequest(request_id="s0.x"), metadata=metadata),
            lambda: keyed.stub.Explain(ExplainRequest(request_id="s0.x"), metadata=metadata),
            lambda: keyed.stub.Resume(ResumeRequest(request_id="s0.x"), metadata=metadata).read(),
            lambda: keyed.stub.Tokenize(TokenizeRequest(text="x"), metadata=metadata),
            lambda: keyed.stub.Detokenize(DetokenizeRequest(token_ids=[7]), metadata=metadata),
        )
        for _ in range(10):  # the next one comes in six seconds
            await keyed.stub.Detokenize(DetokenizeRequest(token_ids=[7]), metadata=metadata)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert has_retry_info(error.value)

    async def test_more_than_may_be_open_is_told_to_come_again(
        self, keyed: Running, scheduler: FakeScheduler
    ) -> None:
        assert keyed.gateway.http is not None
        metadata = (("authorization", f"Bearer {ACME}"),)
        first = keyed.stub.GenerateStream(GenerateRequest(text="x"), metadata=metadata)
        await scheduler.submitted()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await keyed.stub.Generate(GenerateRequest(text="x", n=2), metadata=metadata)
        async with (
            aiohttp.ClientSession(headers=bearer(ACME)) as session,
            session.post(
                f"http://127.0.0.1:{keyed.gateway.http.port}/v1/completions", json={"prompt": "x", "n": 2}
            ) as response,
        ):
            assert response.status == 429
            assert response.headers["Retry-After"] in ("1", "2"), "the second of those refused"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        first.cancel()

        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert has_retry_info(error.value)

    async def test_what_is_refused_before_it_is_a_request_is_counted_too(self, keyed: Running) -> None:
        assert keyed.gateway.http is not None
        url = f"http://127.0.0.1:{keyed.gateway.http.port}/v1/completions"
        wrong = {"tenant": "acme", "code": "INVALID_ARGUMENT"}

        def counted() -> tuple[float, float, float]:
            refused = "laps_sd_gateway_refused_total"
            return (
                metrics.value(refused, {"code": "UNAUTHENTICATED"}),
                metrics.value(refused, {"code": "INVALID_ARGUMENT"}),
                metrics.value("laps_sd_gateway_tenant_refused_total", wrong),
            )

        before = counted()
        await self._refuse(url, {}, {"prompt": "x"})
        await self._refuse(url, bearer("wrong"), {"prompt": "x"})
        await self._refuse(url, bearer(ACME), {"prompt": "x", "colour": "red"})  # the protocol's own layer
        await self._refuse(url, bearer(ACME), {"prompt": "x", "top_p": 2})  # what all protocols share

        assert tuple(now - then for now, then in zip(counted(), before, strict=True)) == (2, 2, 2)

    @staticmethod
    async def _refuse(url: str, headers: Mapping[str, str], body: Any) -> None:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json=body) as response,
        ):
            assert response.status in (400, 401)

    @pytest.mark.parametrize(
        ("key", "body", "status", "code"),
        [
            (None, {}, 401, "invalid_api_key"),
            ("wrong", {}, 401, "invalid_api_key"),
            (ACME, {"priority": 6}, 403, None),
            (ACME, {"n": 3}, 400, None),  # more than it may ever have open: it need not come again
        ],
    )
    async def test_http_says_so_in_its_own_words(
        self, keyed: Running, key: str | None, body: Any, status: int, code: str | None
    ) -> None:
        assert keyed.gateway.http is not None
        headers = bearer(key) if key else {}
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{keyed.gateway.http.port}", headers=headers
        ) as session:
            async with session.post("/v1/completions", json={"prompt": "x"} | body) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == code
                assert ("WWW-Authenticate" in response.headers) == (status == 401)
            for path in ("/v1/models", "/metrics"):
                async with session.get(path) as response:
                    assert (response.status == 401) == (status == 401)
            for path in ("/health", "/openapi.json"):
                async with session.get(path) as response:
                    assert response.status == 200
