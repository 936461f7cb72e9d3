"""Enrolment documents: the aggregator's invitation and the silo's card. Public values only."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ddm.protocol.base import Digest, Document, KeyText, ShortText, SiloId, Time


class Invitation(Document):
    """What a silo needs to join a federation; to be trusted only after comparing `root_digest` out of band."""

    format: Literal["archipelago/invitation/1"] = "archipelago/invitation/1"
    federation: ShortText
    address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.\-\[\]:]{1,255}:[0-9]{1,5}$")]
    ca_certificate: Annotated[str, Field(max_length=16384)]
    root: Annotated[str, Field(max_length=65536)]
    root_digest: Digest
    log_key: Annotated[str, Field(max_length=400)]


class Card(Document):
    """A silo's public keys, sealed with its signing key as proof of possession."""

    format: Literal["archipelago/card/1"] = "archipelago/card/1"
    silo_id: SiloId
    signing_key: KeyText
    node_key: Annotated[str, StringConstraints(pattern=r"^ecdsa-sha2-nistp(256|384) [A-Za-z0-9+/=]{1,400}$")]
    created_at: Time


CARD_KIND = "card"
