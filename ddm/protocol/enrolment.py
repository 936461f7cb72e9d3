"""Enrolment documents: the aggregator's invitation, the silo's card and its change of keys. Public values only."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.address import HostAndPort
from ddm.protocol.base import (
    MAX_INTEGER,
    Digest,
    Document,
    KeyText,
    Licence,
    Model,
    PositiveInt,
    ShortText,
    SiloId,
    Time,
    Unit,
)
from ddm.protocol.federation import FederationDocument
from ddm.protocol.policy import PolicyLimits

AgreedNumber = Annotated[int, Field(ge=2, le=MAX_INTEGER)]
# The verifier key of a signed note: name+hash+key.
LogKeyText = Annotated[
    str, StringConstraints(pattern=r"^[!-*,-~]{1,255}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}$")
]


class Invitation(Document):
    """What a silo needs to join a federation; to be trusted only after comparing the code of its digest out of band."""

    format: Literal["archipelago/invitation/1"] = "archipelago/invitation/1"
    federation: ShortText
    # Of the releases, so that a site knows it before it joins. Plans state it too, and are signed.
    licence: Licence
    address: HostAndPort
    ca_certificate: Annotated[str, Field(max_length=16384)]
    root: Annotated[str, Field(max_length=65536)]
    root_digest: Digest
    log_key: LogKeyText


class AgreedSize(Model):
    """The most data that a silo may bring, agreed between its operator and the aggregator's: a bound on its prior.

    Attributes:
        images: most images.
        patients: most patients, where the silo counts them; they cannot be more than its images.
    """

    images: AgreedNumber
    patients: AgreedNumber | None = None

    @model_validator(mode="after")
    def _patients_have_images(self) -> "AgreedSize":
        if self.patients is not None and self.patients > self.images:
            raise ValueError(
                f"patients cannot be more than images, got {self.patients} and {self.images}"
            )
        return self

    def units(self, unit: Unit) -> int:
        """Return the most units of this kind; each patient has an image, so that images bound patients as well."""
        if unit == "image" or self.patients is None:
            return self.images
        return self.patients

    def __str__(self) -> str:
        if self.patients is None:
            return f"{self.images} images"
        return f"{self.images} images of {self.patients} patients"


class Card(FederationDocument):
    """A silo's public keys and its agreed size, sealed with its signing key as proof of possession.

    `limits` is what its policy let a plan require when the card was made; a silo still holds each plan against its
    policy.
    """

    format: Literal["archipelago/card/1"] = "archipelago/card/1"
    silo_id: SiloId
    signing_key: KeyText
    node_key: Annotated[
        str, StringConstraints(pattern=r"^ecdsa-sha2-nistp(256|384) [A-Za-z0-9+/=]{1,400}$")
    ]
    agreed: AgreedSize
    # For `aggregator plan`, which refuses a plan above one silo's policy before it is signed and sent (docs/adr/0060).
    limits: PolicyLimits
    created_at: Time


MAX_INVITATION_BYTES = 1024 * 1024
CARD_KIND = "card"
MAX_CARD_BYTES = 16384

MAX_ROTATION_BYTES = 4096
MAX_ROTATIONS = 64
# Beyond these bounds the aggregator leaves out the oldest rotations of each silo.
MAX_KEY_HISTORY_BYTES = 4 * 1024 * 1024
ROTATED_CARD_FORMAT = "archipelago/rotated-card/1"
# An envelope as `ddm.trust.envelope` writes it; what is in it is read after its signature is checked.
_ENVELOPE = r'^\{"format":"archipelago/envelope/1",[^\r\n]*\}$'
SealedText = Annotated[str, StringConstraints(pattern=_ENVELOPE, max_length=MAX_ROTATION_BYTES)]


class KeyRotation(FederationDocument):
    """A silo's change from one signing key to the next, sealed by both; `number` counts its changes from 1."""

    format: Literal["archipelago/key-rotation/1"] = "archipelago/key-rotation/1"
    silo_id: SiloId
    number: PositiveInt
    old_key: KeyText
    new_key: KeyText
    at: Time


class RotatedCard(Document):
    """What `silo rotate` hands to the aggregator: the new card, and every rotation up to its key, each sealed."""

    format: Literal["archipelago/rotated-card/1"] = "archipelago/rotated-card/1"
    card: Annotated[str, StringConstraints(pattern=_ENVELOPE, max_length=MAX_CARD_BYTES)]
    rotations: Annotated[tuple[SealedText, ...], Field(min_length=1, max_length=MAX_ROTATIONS)]


class KeyHistory(Document):
    """The sealed rotations of a release's silos, by silo and in order; the last one leads to the key that signed."""

    format: Literal["archipelago/key-history/1"] = "archipelago/key-history/1"
    silos: Annotated[
        dict[
            SiloId, Annotated[tuple[SealedText, ...], Field(min_length=1, max_length=MAX_ROTATIONS)]
        ],
        Field(max_length=1024),
    ]
