"""The strict schema of TUF metadata files, checked before python-tuf's lenient one.

python-tuf keeps unknown fields, some of them outside the signature, and accepts any hash, key type and number. Here
every field is known, typed and bounded, and each file has one encoding.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, create_model, model_validator

from ddm.errors import DocumentError
from ddm.protocol.base import MAX_SILOS, Digest, Model, describe_error
from ddm.protocol.enrolment import LogKeyText

_Hex128 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{128}$")]
# A stolen online key can sign any version; one that no later version can exceed would end the federation.
MAX_VERSION = 2**31
_Version = Annotated[int, Field(gt=0, le=MAX_VERSION)]
_Length = Annotated[int, Field(ge=0, le=2**50)]
_Spec = Annotated[str, StringConstraints(pattern=r"^1\.0\.[0-9]{1,3}$")]
_Expires = Annotated[
    str, StringConstraints(pattern=r"^2[0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")
]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
_Path = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class _Signature(Model):
    keyid: Digest
    sig: _Hex128


class _KeyValue(Model):
    public: Digest


class _Key(Model):
    keytype: Literal["ed25519"]
    scheme: Literal["ed25519"]
    # 32 bytes, which a key and a sha256 digest both have.
    keyval: _KeyValue


class _Role(Model):
    keyids: Annotated[list[Digest], Field(min_length=1, max_length=64)]
    threshold: Annotated[int, Field(ge=1, le=64)]

    @model_validator(mode="after")
    def _threshold_is_reachable(self) -> "_Role":
        if self.threshold > len(self.keyids):
            raise ValueError(
                f"threshold must be at most the number of keys, {len(self.keyids)}, got {self.threshold}"
            )
        return self


class _DelegatedRole(_Role):
    name: _Name
    terminating: Literal[True]
    paths: Annotated[list[_Path], Field(max_length=16)]


class _Delegations(Model):
    keys: dict[Digest, _Key]
    # `plans`, `release`, and a role for each silo.
    roles: Annotated[list[_DelegatedRole], Field(max_length=MAX_SILOS + 2)]


class _Hashes(Model):
    sha256: Digest


class _Target(Model):
    length: _Length
    hashes: _Hashes


class _MetaFile(Model):
    """A listed metadata file; without length and hashes its role was removed (`ddm.trust.repository`)."""

    version: _Version
    length: _Length | None = None
    hashes: _Hashes | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> "_MetaFile":
        if (self.length is None) != (self.hashes is None):
            present = "length" if self.hashes is None else "hashes"
            raise ValueError(f"length and hashes must be given together, got only {present}")
        return self


class _LiveMetaFile(_MetaFile):
    length: _Length
    hashes: _Hashes


# TUF has "snapshot.json" as a field name, and lists exactly this file in a timestamp.
class _TimestampMeta(Model):
    snapshot: _LiveMetaFile = Field(alias="snapshot.json")


class _TopRoles(Model):
    root: _Role
    timestamp: _Role
    snapshot: _Role
    targets: _Role


class _CommonFields(Model):
    version: _Version
    spec_version: _Spec
    expires: _Expires


class _Root(_CommonFields):
    type: Literal["root"] = Field(alias="_type")
    # A release is one folder that is copied as a whole: its files need no versions in their names.
    consistent_snapshot: Literal[False]
    # TUF does not know it (`ddm.trust.drafts`).
    log_key: LogKeyText | None = None
    keys: dict[Digest, _Key]
    roles: _TopRoles


class _Timestamp(_CommonFields):
    type: Literal["timestamp"] = Field(alias="_type")
    meta: _TimestampMeta


class _Snapshot(_CommonFields):
    type: Literal["snapshot"] = Field(alias="_type")
    meta: Annotated[dict[_Name, _MetaFile], Field(max_length=65536)]


class _Targets(_CommonFields):
    type: Literal["targets"] = Field(alias="_type")
    targets: Annotated[dict[_Path, _Target], Field(max_length=4096)]
    # Of a silo's role; TUF does not know it (`ddm.trust.silo_role`).
    root_digest: Digest | None = None
    delegations: _Delegations | None = None


def _file_of(signed: type[Model]) -> type[Model]:
    signatures = Annotated[list[_Signature], Field(min_length=1, max_length=128)]
    return create_model(
        f"{signed.__name__}File",
        __base__=Model,
        signatures=(signatures, ...),
        signed=(signed, ...),
    )


_SIGNED: dict[str, type[Model]] = {
    "root": _Root,
    "timestamp": _Timestamp,
    "snapshot": _Snapshot,
    "targets": _Targets,
}
_FILES = {kind: _file_of(signed) for kind, signed in _SIGNED.items()}


def check_schema(
    value: Any,
    kind: str,
    subject: str,
    *,
    unsigned: bool = False,
) -> None:
    """Refuse parsed JSON that is not exactly a metadata file of this kind.

    Args:
        value: as `json.loads` returns it.
        kind: ``root``, ``timestamp``, ``snapshot`` or ``targets``.
        subject: the file, for the error.
        unsigned: whether it is only the part that is signed.

    Raises:
        DocumentError: a missing or unknown field, one of another type, or an exceeded bound.
    """
    model = _FILES[kind]
    if unsigned:
        model = _SIGNED[kind]
    try:
        model.model_validate(value)
    except ValidationError as error:
        where, what = describe_error(model, error)
        raise DocumentError(
            subject,
            expected=f"{kind} metadata",
            got=f"field {where}: {what}",
        ) from error
