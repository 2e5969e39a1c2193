"""Warnings of settings that differ between a gateway and the schedulers and workers of a shard."""

from __future__ import annotations

from gateway.settings import GatewaySettings
from laps_sd.contract.length_features import key_digest
from laps_sd.service.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as link_pb2

__all__ = ["Mismatches"]

log = get_logger(__name__)

TAKEOVER_S = 5.0
"""Seconds of a change of leader beyond its lease, as the chart counts them."""


class Mismatches:
    """Compares the settings of a gateway with what a shard reports of its own."""

    def __init__(self, settings: GatewaySettings, shard: str, gateway_id: str, vocabulary: bytes) -> None:
        """`vocabulary`: digest of the tokens of the gateway's model, with which that of the shard's workers is
        compared; empty: it is not."""
        self._settings = settings
        self._shard = shard
        self._gateway_id = gateway_id
        self._vocabulary = vocabulary
        self._other_vocabulary = b""
        """The workers' digest, if it was another one."""

    def warn_of_hello(self, hello: link_pb2.SchedulerHello, address: str) -> None:
        """Warn of a scheduler that reads the words of prompts under another key than this gateway hashes them, and
        if calls do not wait as long as it takes to replace a leader that died."""
        settings = self._settings
        digest, lease_s = hello.length_key_digest, hello.lease_s
        if settings.predict_lengths and digest and digest != key_digest(settings.length_key):
            log.warning(
                "this gateway and the scheduler have different LAPS_SD_LENGTH_KEY, so that lengths are learned from noise:"
                " all gateways and schedulers must have the same",
                gateway_id=self._gateway_id,
                scheduler=address,
                shard=self._shard,
            )
        if lease_s and settings.scheduler_wait_s < lease_s + TAKEOVER_S:
            log.warning(
                "calls would be refused whenever a leader dies: LAPS_SD_SCHEDULER_WAIT_S must be at least LAPS_SD_LEASE_S of the"
                f" schedulers and {TAKEOVER_S:g} s",
                scheduler_wait_s=settings.scheduler_wait_s,
                lease_s=lease_s,
                scheduler=address,
                shard=self._shard,
            )

    def warn_of_load(self, load: link_pb2.ShardLoad) -> None:
        """Warn once of workers whose token ids mean something else than the gateway's."""
        if not self._vocabulary or load.vocabulary in (b"", self._vocabulary, self._other_vocabulary):
            return
        self._other_vocabulary = load.vocabulary
        log.warning(
            "the workers have another tokenizer than this gateway, so that texts may be wrong: LAPS_SD_TOKENIZER_DIR must name"
            " the workers' target model",
            shard=self._shard,
        )
