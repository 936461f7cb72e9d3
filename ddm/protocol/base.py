"""The base of every document: strict frozen models, bounded parsing, one canonical encoding, checked names."""

import codecs
import hashlib
import json
import re
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import rfc8785
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ddm.errors import DocumentError, SetupError

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
# The most silos of a plan, carried ones included.
MAX_SILOS = 1024
MAX_DEPTH = 32
# A value of two bytes may cost hundreds, as a Python object or as an error that pydantic keeps.
MAX_VALUES = 65_536
_MAX_ERRORS = 1000
# RFC 8785 writes no integer that a double cannot hold.
MAX_INTEGER = 2**53 - 1
_MAX_INTEGER_DIGITS = 32
# At least as many as an integer beyond 2**53 has.
_LONG_DIGITS = re.compile(rb"[0-9]{16}")
# For a text that is signed as bytes, and has other bytes of the same meaning.
REWRITTEN_FILE_REMEDY = (
    "An editor or a mail program changed this file. Ask for it again, as an attachment or in a zip archive, and save "
    "it without opening it."
)
UNSHOWN_TEXT = "text with control, invisible or direction-changing characters"

# A silo's name has no hyphen: an expert's name, SILO or SILO-NUMBER, is then never that of another silo's expert.
SILO_ID_PATTERN = r"[a-z][a-z0-9]{0,31}"
# The eight hex digits at the end are random (`ddm.planning.document`), so that plans of one name are told apart.
PLAN_ID_PATTERN = r"[a-z][a-z0-9-]{0,40}-[0-9a-f]{8}"
EXPERT_ID_PATTERN = r"[a-z][a-z0-9]{0,31}(-[0-9]{1,4})?"
# No segment begins with a dot, so that a path that was received never climbs out of its folder with `..`.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"

# pydantic matches with Rust's regex, whose `$` is the end of the text alone; that of Python allows a newline after it.
SiloId = Annotated[str, StringConstraints(pattern=f"^{SILO_ID_PATTERN}$")]
PlanId = Annotated[str, StringConstraints(pattern=f"^{PLAN_ID_PATTERN}$")]
ExpertId = Annotated[str, StringConstraints(pattern=f"^{EXPERT_ID_PATTERN}$")]
RelativePath = Annotated[
    str, StringConstraints(pattern=rf"^{_SEGMENT}(/{_SEGMENT}){{0,7}}$", max_length=512)
]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
KeyText = Annotated[str, StringConstraints(pattern="^ed25519:[0-9a-f]{64}$")]
MAX_TEXT = 400
# No control character, no line break, nothing that turns the direction of writing (Trojan Source, CVE-2021-42574) or is
# invisible: what a person reads in a document, on any terminal and page, is all that was signed.
UNSHOWN = r"\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
TEXT_PATTERN = f"^[^{UNSHOWN}]*$"
ShortText = Annotated[str, StringConstraints(pattern=TEXT_PATTERN, max_length=MAX_TEXT)]
"""Free text of a document: what is signed or published has no other type for it."""
LocalText = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
"""Text of a record that stays where it was written, such as a path: shown with `ddm.system.escape`."""
Licence = Annotated[ShortText, StringConstraints(min_length=1)]
# Without a zone it would be another moment on each machine.
Time = AwareDatetime
Unit = Literal["image", "patient"]
# The upper bound is what an epsilon without noise reads (`ddm.protocol.statistics.EXACT`).
Epsilon = Annotated[float, Field(gt=0.0, le=1000.0)]
Delta = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(gt=0, le=MAX_INTEGER)]
NaturalInt = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
NumImages = Annotated[int, Field(gt=0, le=10**9)]
NumSteps = Annotated[int, Field(gt=0, le=10**9)]
NumBytes = Annotated[int, Field(gt=0, le=2**44)]  # 16 TiB
Seconds = Annotated[float, Field(ge=0.0, le=1e10)]
Measure = Annotated[float, Field(ge=-1e30, le=1e30)]  # a loss or a metric


class Model(BaseModel):
    """A frozen, strict part of a document; unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Document(Model):
    """A whole document: it has a `format`, and is written, digested, signed and parsed."""

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
            DocumentError: too large, not JSON, a duplicate field name, nested too deeply, or not of this schema.
        """
        # pydantic's own parser would take the last of two values of one name without a word.
        check_json(data, subject=subject, limit=limit)
        try:
            document = cls.model_validate_json(data)
        except ValidationError as error:
            field, fault = describe_error(cls, error)
            if field == "format":
                formats = get_args(cls.model_fields["format"].annotation)
                raise DocumentError(
                    subject,
                    expected=f"a document whose format is {', '.join(formats)}",
                    got=fault,
                    remedy="This is a document of another kind or version: name the right file, or ask for that one.",
                ) from error
            raise DocumentError(f"{subject}, field {field}", got=fault) from error
        # A number of operations may be that long, since canonical JSON writes a float without a point; a whole number
        # may not. Few documents hold such digits, so that few are encoded for this.
        if _LONG_DIGITS.search(data):
            try:
                document.encode()
            except rfc8785.IntegerDomainError as error:
                raise DocumentError(
                    subject, expected=f"whole numbers up to {MAX_INTEGER}", got="a larger one"
                ) from error
        return document


class File(Model):
    """One file that a document lists: its path, length and sha256."""

    path: RelativePath
    bytes: NumBytes
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


def require_text(text: str | None, subject: str) -> str:
    """Return a text that an operator typed for a document, without blanks around it.

    Raises:
        SetupError: it is empty, too long, or not a `ShortText`.
    """
    plain = (text or "").strip()
    got = f"{len(plain)} characters"
    if 0 < len(plain) <= MAX_TEXT:
        if re.fullmatch(TEXT_PATTERN, plain):
            return plain
        got = UNSHOWN_TEXT
    raise SetupError(
        subject,
        expected=f"1 to {MAX_TEXT} visible characters on one line",
        got=got,
        remedy="Type the text again; copied text may hold characters that are not visible.",
    )


def now_utc() -> datetime:
    """Return the present time, UTC, whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def describe_error(model: type[BaseModel], error: ValidationError) -> tuple[str, str]:
    """Describe the first error in received data without repeating any text of the sender's.

    Args:
        model: the expected schema.
        error: pydantic's.

    Returns:
        The field as a dotted path, without names that `model` does not have, and what is wrong with it.
    """
    # Each error becomes an object of Python; a document can be wrong in tens of thousands of places.
    if error.error_count() > _MAX_ERRORS:
        return "document", f"more than {_MAX_ERRORS} fields that do not fit"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # A name that the schema does not have is the sender's text: it could carry an escape sequence or a patient's name.
    known_names = _field_names(model)
    parts = [str(part) for part in first["loc"] if isinstance(part, int) or part in known_names]
    field = ".".join(parts) or "document"
    # The only message of pydantic that quotes its input.
    if first["type"] == "union_tag_invalid":
        return field, "an unknown kind"
    if first["type"] == "string_pattern_mismatch" and TEXT_PATTERN in first["msg"]:
        return field, UNSHOWN_TEXT
    return field, first["msg"]


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    schema = model.model_json_schema()
    names: set[str] = set()
    for part in (schema, *schema.get("$defs", {}).values()):
        names.update(part.get("properties", {}))
    return frozenset(names)


def change_on_the_way(data: bytes) -> str | None:
    """Name what an editor or a mail program did to a text that others wrote; None where nothing is seen.

    The toolkit writes no byte order mark and no CR LF, and signs bytes: either of them makes a signature invalid.
    """
    mark = _byte_order_mark(data)
    if mark is not None:
        return mark
    if b"\r\n" in data:
        return "line ends of Windows (CR LF)"
    return None


def _byte_order_mark(data: bytes) -> str | None:
    if data.startswith(codecs.BOM_UTF8):
        return "a byte order mark before the text"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "text in UTF-16"
    return None


def check_json(data: bytes, *, subject: str, limit: int) -> Any:
    """Refuse bytes that are too large, not UTF-8 JSON, nested too deeply, of too many values, or with a duplicate name.

    Returns:
        The parsed value.

    Raises:
        DocumentError: any of these, NaN, or an integer that canonical JSON cannot write.
    """
    if len(data) > limit:
        raise DocumentError(subject, expected=f"at most {limit} bytes", got=f"{len(data)} bytes")
    mark = _byte_order_mark(data)
    if mark is not None:
        raise DocumentError(subject, expected="UTF-8 JSON", got=mark, remedy=REWRITTEN_FILE_REMEDY)
    _check_structure(data, subject)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            parse_float=_parse_float,
        )
    except (ValueError, RecursionError) as error:
        if _is_line_break_in_text(error):
            raise DocumentError(
                subject,
                expected="UTF-8 JSON",
                got="a line break inside a text",
                remedy=REWRITTEN_FILE_REMEDY,
            ) from error
        raise DocumentError(
            subject, expected="UTF-8 JSON with unique field names", got=str(error)[:120]
        ) from error


def _is_line_break_in_text(error: Exception) -> bool:
    """Whether a JSON parser met a line break between quotes, where mail programs and editors break long lines."""
    if not isinstance(error, json.JSONDecodeError) or "control character" not in error.msg:
        return False
    return error.doc[error.pos] in "\r\n"


# Matches strings, unterminated ones too, without backtracking, so that the time is linear in the length.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[][{},]', re.DOTALL)


def _check_structure(data: bytes, subject: str) -> None:
    """Bound nesting and the number of values before a parser sees them."""
    depth = 0
    num_values = 1
    for token in _TOKEN.finditer(data):
        match data[token.start()]:
            case 0x5B | 0x7B:  # [ {
                depth += 1
            case 0x5D | 0x7D:  # ] }
                depth -= 1
            case 0x2C:  # ,
                num_values += 1
        if depth > MAX_DEPTH:
            raise DocumentError(
                subject,
                expected=f"nesting of at most {MAX_DEPTH}",
                got=f"nesting of {depth} or more",
            )
        if num_values > MAX_VALUES:
            raise DocumentError(
                subject, expected=f"at most {MAX_VALUES} values", got=f"{MAX_VALUES + 1} or more"
            )


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; of two values of one name, two programs might read different ones."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError("a field name appears twice")
        values[name] = value
    return values


def _parse_integer(digits: str) -> int | float:
    """Return a number without a point: an integer, or beyond 2**53 the float that RFC 8785 writes in these digits.

    Two programs may read different integers beyond 2**53, so that no other digits are taken there.
    """
    # Digits are counted first, since the time of int() grows with their square.
    if len(digits) <= _MAX_INTEGER_DIGITS:
        if abs(int(digits)) <= MAX_INTEGER:
            return int(digits)
        if rfc8785.dumps(float(digits)) == digits.encode():
            return float(digits)
    raise ValueError(f"an integer of more than {MAX_INTEGER}")


def _parse_float(text: str) -> float:
    """Return a number with a point or an exponent; what is too large for a float would be read as infinity."""
    number = float(text)
    if not isfinite(number):
        raise ValueError("a number that is too large")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
