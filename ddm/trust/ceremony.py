"""Signing ceremonies: several holders sign one document, each on a machine of their own.

A request contains everything that a holder's machine needs. The machine derives the meaning of the document from the
bytes to sign and those that they replace: the sender's description could be a lie, such as "renew for a year" over a
document that adds a key. The answer is a small file with one signature over those bytes, so that answers to another
request, or to one changed since, do not verify.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints
from tuf.api.metadata import Root, Targets

from ddm.errors import SignatureError
from ddm.protocol.base import Digest, Document, KeyText, ShortText, sha256_hex
from ddm.trust.drafts import Holders, delegated_roles, holders_of, log_key_of
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import attach, parse_payload, payload_of, public_key

# A payload is text inside JSON, so that a holder can read the request with any editor.
_Payload = Annotated[str, Field(max_length=2_000_000)]
MAX_REQUEST_BYTES = 8_000_000
MAX_SIGNATURE_BYTES = 4096

T = TypeVar("T", PublicKey, str)


class SigningRequest(Document):
    """A document to be signed by its holders.

    Attributes:
        role: the role whose metadata it is.
        purpose: the sender's description.
        payload: the bytes to sign.
        before: the payload that it replaces; None for a first version.
        root: the payload of the root that names the holders of `targets`; None for a root, which names its own.
    """

    format: Literal["archipelago/ceremony/1"] = "archipelago/ceremony/1"
    role: Literal["root", "targets"]
    purpose: ShortText
    payload: _Payload
    before: _Payload | None = None
    root: _Payload | None = None

    @classmethod
    def to_sign(
        cls,
        signed: Root | Targets,
        purpose: str,
        before: Root | Targets | None,
        root: Root | None = None,
    ) -> "SigningRequest":
        """Make the request for a draft of `root` or `targets`."""
        return cls(
            role="root" if isinstance(signed, Root) else "targets",
            purpose=purpose,
            payload=payload_of(signed).decode(),
            before=_payload_text(before),
            root=_payload_text(root),
        )

    @property
    def name(self) -> str:
        """The name of its file: role and version."""
        return f"{self.role}-{self.document().version}.json"

    def document(self) -> Root | Targets:
        """Parse the bytes to sign."""
        return self._parse(self.payload)

    def replaced(self) -> Root | Targets | None:
        """Parse the metadata that these bytes replace."""
        if self.before is None:
            return None
        return self._parse(self.before)

    def holders(self) -> Sequence[Holders]:
        """List who must sign; a new root needs the holders of the old one and its own."""
        # Holders of `targets` are named by the root. It travels with the request, since a holder's machine has no
        # federation; a wrong root gets signatures that the repository refuses.
        if self.role == "targets":
            root = parse_payload((self.root or "").encode(), Root, "the root of this request")
            return [holders_of(root)["targets"]]
        roots = [root for root in (self.replaced(), self.document()) if isinstance(root, Root)]
        return [holders_of(root)["root"] for root in roots]

    def _parse(self, payload: str) -> Root | Targets:
        if self.role == "root":
            return parse_payload(payload.encode(), Root, "root to sign")
        return parse_payload(payload.encode(), Targets, "targets to sign")


def _payload_text(signed: Root | Targets | None) -> str | None:
    if signed is None:
        return None
    return payload_of(signed).decode()


class HolderSignature(Document):
    """One holder's answer: a signature over the payload of a request."""

    format: Literal["archipelago/holder-signature/1"] = "archipelago/holder-signature/1"
    payload_digest: Digest
    key: KeyText
    signature: Annotated[str, StringConstraints(pattern="^[0-9a-f]{128}$")]


def sign_request(request: SigningRequest, key: SigningKey) -> HolderSignature:
    """Sign as one of the holders.

    Raises:
        SignatureError: the key is not a holder's.
        DocumentError: the request does not parse.
    """
    # Before signing: a signature by another key would only be found out in the end, by the one who completes the
    # ceremony.
    _check_holder(request, key.public)
    payload = request.payload.encode()
    return HolderSignature(
        payload_digest=sha256_hex(payload),
        key=str(key.public),
        signature=key.sign(payload).hex(),
    )


def check_answers(
    request: SigningRequest, answers: Sequence[HolderSignature]
) -> Mapping[PublicKey, bytes]:
    """Check every answer; a wrong one is an error and not ignored.

    Returns:
        Key to signature.

    Raises:
        SignatureError: one over other bytes, by a key that is not a holder's, a second one by a holder, or an invalid
            one.
    """
    payload = request.payload.encode()
    payload_digest = sha256_hex(payload)
    signatures: dict[PublicKey, bytes] = {}
    for answer in answers:
        key = PublicKey.parse(answer.key)
        subject = f"signature on {request.name} by {key.short[:19]}"
        # The digest is compared for the message only: a signature over other bytes does not verify below.
        if answer.payload_digest != payload_digest:
            raise SignatureError(
                subject,
                expected=f"a signature over sha256 {payload_digest[:16]}...",
                got=f"a signature over sha256 {answer.payload_digest[:16]}...",
            )
        _check_holder(request, key)
        # Two files by one holder would look like two holders to a person who counts files.
        if key in signatures:
            raise SignatureError(
                subject,
                expected="one signature per holder",
                got="two signatures by this holder",
            )
        signature = bytes.fromhex(answer.signature)
        key.verify(signature, payload)
        signatures[key] = signature
    return signatures


def describe_missing_signatures(
    request: SigningRequest, signatures: Mapping[PublicKey, bytes]
) -> list[str]:
    """Describe the thresholds that are not met yet, one in a line."""
    lines = []
    for holders in request.holders():
        num_signed = sum(key in signatures for key in holders.keys)
        if num_signed < holders.threshold:
            missing = ", ".join(key.short[:19] for key in holders.keys if key not in signatures)
            lines.append(
                f"{request.name}: {num_signed} of {holders.threshold} signatures; "
                f"it can be signed by {missing}"
            )
    return lines


def join_signatures(request: SigningRequest, signatures: Mapping[PublicKey, bytes]) -> bytes:
    """Return the signed metadata file."""
    return attach(request.document(), signatures)


def describe_request(request: SigningRequest) -> str:
    """Describe what a signature on this document approves: its whole content, and its changes."""
    document = request.document()
    before = request.replaced()
    replaces = f"replaces version {before.version}" if before else "the first version"
    old_roles: Mapping[str, _RoleTerms] = {}
    if before is not None:
        old_roles = _role_terms(before)
    # Fixed lines first, the sender's purpose marked as such, then everything that is computed from the bytes.
    lines = [
        f"{request.role}, version {document.version} ({replaces}), valid until {document.expires:%Y-%m-%d}",
        f"sha256 of the bytes to sign: {sha256_hex(request.payload.encode())}",
        f"The sender says that it is for: {request.purpose}",
        "",
        *_describe_roles(_role_terms(document), old_roles),
        *_describe_log_key(document, before),
    ]
    return "\n".join(lines)


def _on_one_line(text: str) -> str:
    """Return a text that cannot imitate other lines of the description, or move the cursor of a terminal."""
    if text.isprintable():
        return text
    return ascii(text)


@dataclass(frozen=True)
class _RoleTerms:
    """Who may sign for a role: how many of which keys, and which paths it may list."""

    threshold: int
    keys: tuple[PublicKey, ...]
    paths: tuple[str, ...]


def _role_terms(signed: Root | Targets) -> Mapping[str, _RoleTerms]:
    """Read the terms of each role that this metadata names."""
    if isinstance(signed, Root):
        return {
            name: _RoleTerms(holders.threshold, holders.keys, ())
            for name, holders in holders_of(signed).items()
        }
    terms = {}
    for name, role in delegated_roles(signed).items():
        keys = tuple(public_key(signed.get_key(keyid)) for keyid in role.keyids)
        terms[name] = _RoleTerms(role.threshold, keys, tuple(role.paths or ()))
    return terms


def _describe_roles(
    roles: Mapping[str, _RoleTerms], old_roles: Mapping[str, _RoleTerms]
) -> Iterator[str]:
    """Yield lines on every role, old and new: a change that is not shown could be approved unseen."""
    # New roles in their order, then those that are gone.
    removed = [name for name in old_roles if name not in roles]
    for name in (*roles, *removed):
        terms = roles.get(name, _RoleTerms(0, (), ()))
        old_terms = old_roles.get(name, _RoleTerms(0, (), ()))
        if name not in roles:
            yield f"{name}: LEAVES"
        else:
            new = ": NEW" if old_roles and name not in old_roles else ""
            line = f"{name}{new}: {terms.threshold} of {len(terms.keys)} must sign"
            if name in old_roles and old_terms.threshold != terms.threshold:
                line += f" (was {old_terms.threshold})"
            yield line
        for mark, key in _marked_changes(terms.keys, old_terms.keys):
            yield f"  {mark} key {key.short}"
        for mark, path in _marked_changes(terms.paths, old_terms.paths):
            yield f"  {mark} may list {_on_one_line(path)}"


def _marked_changes(new: Sequence[T], old: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Yield every element with `+` where it is added, `-` where it is removed, and a blank where it stays."""
    for element in new:
        yield (" " if element in old else "+"), element
    for element in old:
        if element not in new:
            yield "-", element


def _describe_log_key(document: Root | Targets, before: Root | Targets | None) -> list[str]:
    """Describe the key of the log, which only a root names."""
    if not isinstance(document, Root):
        return []
    log_key = log_key_of(document)
    old_log_key = None
    if isinstance(before, Root):
        old_log_key = log_key_of(before)
    if log_key is None and old_log_key is None:
        return []
    if log_key is None:
        return [f"log: LEAVES, {old_log_key}"]
    if before is None or log_key == old_log_key:
        return [f"log: {log_key}"]
    return [f"log: {log_key} (was {old_log_key})"]


def _check_holder(request: SigningRequest, key: PublicKey) -> None:
    if not any(key in holders.keys for holders in request.holders()):
        raise SignatureError(
            f"key {key.short[:19]}",
            expected=f"a key that may sign {request.name}",
            got="a key that is not a holder's",
        )
