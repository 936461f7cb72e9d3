"""Enrolment documents: the aggregator's invitation and the silo's card. Public values only."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.base import Digest, Document, KeyText, Model, ShortText, SiloId, Time, Unit

Agreement = Annotated[int, Field(ge=2, lt=2**53)]


class Invitation(Document):
    """What a silo needs to join a federation; to be trusted only after comparing `root_digest` out of band."""

    format: Literal["archipelago/invitation/1"] = "archipelago/invitation/1"
    federation: ShortText
    address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.\-\[\]:]{1,255}:[0-9]{1,5}$")]
    ca_certificate: Annotated[str, Field(max_length=16384)]
    root: Annotated[str, Field(max_length=65536)]
    root_digest: Digest


class Agreed(Model):
    """The most data that a silo may bring, agreed between its operator and the aggregator's: a bound on its prior.

    Attributes:
        images: most images.
        patients: most patients, where the silo counts them; they cannot be more than its images.
    """

    images: Agreement
    patients: Agreement | None = None

    @model_validator(mode="after")
    def _patients_have_images(self) -> "Agreed":
        if self.patients is not None and self.patients > self.images:
            raise ValueError(f"patients cannot be more than images, got {self.patients} and {self.images}")
        return self

    def units(self, unit: Unit) -> int:
        """Return the most units of this kind; each patient has an image, so that images bound patients as well."""
        return self.images if unit == "image" or self.patients is None else self.patients

    def __str__(self) -> str:
        return f"{self.images} images" + (f" of {self.patients} patients" if self.patients is not None else "")


class Card(Document):
    """A silo's public keys and its agreed size, sealed with its signing key as proof of possession."""

    format: Literal["archipelago/card/1"] = "archipelago/card/1"
    silo_id: SiloId
    signing_key: KeyText
    node_key: Annotated[str, StringConstraints(pattern=r"^ecdsa-sha2-nistp(256|384) [A-Za-z0-9+/=]{1,400}$")]
    agreed: Agreed
    created_at: Time


CARD_KIND = "card"
MAX_CARD_BYTES = 16384
