"""A stock gRPC client that knows nothing but an address: service and messages come from reflection."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from laps_sd.stack.local import LocalStack


def test_a_client_that_knows_the_service_only_by_reflection_streams_a_generation(
    fake_stack: LocalStack,
) -> None:
    with grpc.insecure_channel(fake_stack.gateway_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "laps_sd.v1.Inference" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("laps_sd.v1.Inference").FindMethodByName("GenerateStream")
        request_class, event_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=event_class.FromString,
        )
        request = request_class(text="Once upon a time")
        request.sampling.max_tokens = 12
        request.sampling.ignore_eos = True

        events = list(call(request, timeout=60))

    assert events[0].WhichOneof("event") == "accepted"
    assert events[-1].WhichOneof("event") == "end"
    assert events[-1].end.usage.completion_tokens == 12
    assert sum(len(event.delta.token_ids) for event in events if event.WhichOneof("event") == "delta") == 12
