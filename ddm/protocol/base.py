"""What every document shares: strict frozen models, bounded parsing, one canonical encoding, checked names."""

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import rfc8785
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ddm.errors import DocumentError

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
_MAX_FIELD = 120

SILO_ID_PATTERN = r"[a-z][a-z0-9]{0,31}"
PLAN_ID_PATTERN = r"[a-z][a-z0-9-]{0,40}-[0-9a-f]{8}"
EXPERT_ID_PATTERN = r"[a-z][a-z0-9]{0,31}(-[0-9]{1,4})?"
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"

SiloId = Annotated[str, StringConstraints(pattern=f"^{SILO_ID_PATTERN}$")]
PlanId = Annotated[str, StringConstraints(pattern=f"^{PLAN_ID_PATTERN}$")]
ExpertId = Annotated[str, StringConstraints(pattern=f"^{EXPERT_ID_PATTERN}$")]
RelativePath = Annotated[str, StringConstraints(pattern=rf"^{_SEGMENT}(/{_SEGMENT}){{0,7}}$", max_length=512)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
KeyText = Annotated[str, StringConstraints(pattern="^ed25519:[0-9a-f]{64}$")]
ShortText = Annotated[str, StringConstraints(max_length=400)]
Time = AwareDatetime
Unit = Literal["image", "patient"]
Epsilon = Annotated[float, Field(gt=0.0, le=1000.0)]
Delta = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(gt=0, le=2**53)]
NaturalInt = Annotated[int, Field(ge=0, le=2**53)]


class Model(BaseModel):
    """A frozen, strict part of a document; unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Document(Model):
    """A whole document: something with a `format` that is written, digested, signed and parsed."""

    def encode(self) -> bytes:
        """Return the canonical bytes (RFC 8785) that are written and signed."""
        return rfc8785.dumps(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """The sha256 of `encode()`; for a received document use `sha256_hex` on the bytes received."""
        return sha256_hex(self.encode())

    @classmethod
    def parse(cls, data: bytes, *, subject: str, limit: int = MAX_DOCUMENT_BYTES) -> Self:
        """Parse received bytes, or refuse them.

        Args:
            data: the bytes as received; their digest has been checked where one is known.
            subject: what to call the document in an error.
            limit: most bytes accepted.

        Raises:
            DocumentError: too large, not JSON, a name twice, nested too deeply, or not of this schema.
        """
        check_json(data, subject=subject, limit=limit)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            printable = ascii(where)[1:-1][:_MAX_FIELD]  # a name that nobody knows may hold anything
            raise DocumentError(f"{subject}, field {printable}", got=first["msg"]) from error


class File(Model):
    """One file that a document lists: its path, length and sha256."""

    path: RelativePath
    bytes: PositiveInt
    digest: Digest

    @classmethod
    def of(cls, path: str, source: Path) -> Self:
        """Describe the file at `source` under the name `path`."""
        return cls(path=path, bytes=source.stat().st_size, digest=sha256_file(source))


def sha256_hex(data: bytes) -> str:
    """Return the lowercase sha256 hex of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the lowercase sha256 hex of a file, read as a stream."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def now_utc() -> datetime:
    """Return the present time, UTC, whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def check_json(data: bytes, *, subject: str, limit: int) -> Any:
    """Refuse bytes that are too large, not UTF-8 JSON, too deep, hold NaN, or name a field twice.

    Returns:
        The parsed value.

    Raises:
        DocumentError: on any of these.
    """
    if len(data) > limit:
        raise DocumentError(subject, expected=f"at most {limit} bytes", got=f"{len(data)} bytes")
    _check_depth(data, subject)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DocumentError(subject, expected="UTF-8 JSON with unique field names", got=str(error)[:120]) from error


_BRACKET = re.compile(rb"[][{}]")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def _check_depth(data: bytes, subject: str) -> None:
    """Bound nesting before a recursive parser sees it."""
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", data)):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > MAX_DEPTH:
            raise DocumentError(subject, expected=f"nesting of at most {MAX_DEPTH}", got="deeper")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError("a field name appears twice")
        found[name] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
