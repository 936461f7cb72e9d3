"""Signing ceremonies: several holders sign one document, each on a machine of their own.

A request contains everything that a holder's machine needs. The machine derives the meaning of the document from the
bytes to sign and those that they replace, and does not rely on the sender's description. The answer is a small file
with one signature over those bytes, so answers to another request, or to one changed since, do not verify.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from tuf.api.metadata import Root, Targets

from ddm.errors import SignatureError
from ddm.protocol.base import Digest, Document, KeyText, ShortText, sha256_hex
from ddm.trust.drafts import Holders, holders_of, log_key_of
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import attach, parse_payload, payload_of, public_key

_Payload = Annotated[str, Field(max_length=2_000_000)]
MAX_REQUEST_BYTES = 8_000_000
MAX_SIGNATURE_BYTES = 4096


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
            before=payload_of(before).decode() if before else None,
            root=payload_of(root).decode() if root else None,
        )

    @property
    def name(self) -> str:
        """The name of its file: role and version."""
        return f"{self.role}-{self.signed().version}.json"

    def signed(self) -> Root | Targets:
        """Parse the bytes to sign."""
        return self._parse(self.payload)

    def replaced(self) -> Root | Targets | None:
        """Parse the metadata that these bytes replace."""
        return self._parse(self.before) if self.before is not None else None

    def holders(self) -> Sequence[Holders]:
        """List who must sign; a new root needs the holders of the old one and its own."""
        if self.role == "targets":
            root = parse_payload((self.root or "").encode(), Root, "the root of this request")
            return [holders_of(root)["targets"]]
        roots = [root for root in (self.replaced(), self.signed()) if isinstance(root, Root)]
        return [holders_of(root)["root"] for root in roots]

    def _parse(self, payload: str) -> Root | Targets:
        if self.role == "root":
            return parse_payload(payload.encode(), Root, "root to sign")
        return parse_payload(payload.encode(), Targets, "targets to sign")


class HolderSignature(Document):
    """One holder's answer."""

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
    _check_holder(request, key.public)
    payload = request.payload.encode()
    return HolderSignature(
        payload_digest=sha256_hex(payload), key=str(key.public), signature=key.sign(payload).hex()
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
    found: dict[PublicKey, bytes] = {}
    for answer in answers:
        key = PublicKey.parse(answer.key)
        subject = f"signature on {request.name} by {key.short[:19]}"
        if answer.payload_digest != sha256_hex(payload):
            expected = f"a signature over sha256 {sha256_hex(payload)[:16]}..."
            raise SignatureError(
                subject,
                expected=expected,
                got=f"a signature over sha256 {answer.payload_digest[:16]}...",
            )
        _check_holder(request, key)
        if key in found:
            raise SignatureError(
                subject, expected="one signature per holder", got="two signatures by this holder"
            )
        found[key] = bytes.fromhex(answer.signature)
        key.verify(found[key], payload)
    return found


def unmet(request: SigningRequest, signers: Mapping[PublicKey, bytes]) -> list[str]:
    """Describe the thresholds that are not met yet."""
    waits = []
    for holders in request.holders():
        signed = [key for key in holders.keys if key in signers]
        if len(signed) < holders.threshold:
            left = ", ".join(key.short[:19] for key in holders.keys if key not in signers)
            waits.append(
                f"{request.name}: {len(signed)} of {holders.threshold} signatures; it can be signed by {left}"
            )
    return waits


def join(request: SigningRequest, signers: Mapping[PublicKey, bytes]) -> bytes:
    """Return the signed metadata file."""
    return attach(request.signed(), signers)


def describe_request(request: SigningRequest) -> str:
    """Describe what a signature on this document approves: its whole content, and its changes."""
    signed, before = request.signed(), request.replaced()
    replaces = f"replaces version {before.version}" if before else "the first version"
    log, log_before = (
        log_key_of(each) if isinstance(each, Root) else None for each in (signed, before)
    )
    lines = [
        f"{request.role}, version {signed.version} ({replaces}), valid until {signed.expires:%Y-%m-%d}",
        f"sha256 of the bytes to sign: {sha256_hex(request.payload.encode())}",
        f"The sender says that it is for: {_on_one_line(request.purpose)}",
        "",
        *_differences(_roles(signed), _roles(before) if before else {}),
        *(
            [f"log: {log}{'' if log == log_before or before is None else f' (was {log_before})'}"]
            if log
            else []
        ),
        *([f"log: LEAVES, {log_before}"] if log_before and not log else []),
    ]
    return "\n".join(lines)


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)


_Roles = Mapping[str, tuple[int, tuple[PublicKey, ...], tuple[str, ...]]]


def _roles(signed: Root | Targets) -> _Roles:
    """Role to threshold, keys and paths."""
    if isinstance(signed, Root):
        return {name: (held.threshold, held.keys, ()) for name, held in holders_of(signed).items()}
    delegated = (signed.delegations.roles if signed.delegations else None) or {}
    return {
        name: (
            role.threshold,
            tuple(public_key(signed.get_key(keyid)) for keyid in role.keyids),
            tuple(role.paths or ()),
        )
        for name, role in delegated.items()
    }


def _differences(now: _Roles, before: _Roles) -> Iterator[str]:
    nothing: tuple[int, tuple[PublicKey, ...], tuple[str, ...]] = (0, (), ())
    for name in (*now, *(name for name in before if name not in now)):
        (threshold, keys, paths), (old_threshold, old_keys, old_paths) = (
            now.get(name, nothing),
            before.get(name, nothing),
        )
        if name not in now:
            yield f"{name}: LEAVES"
        else:
            was = f" (was {old_threshold})" if name in before and old_threshold != threshold else ""
            yield f"{name}{'' if name in before or not before else ': NEW'}: {threshold} of {len(keys)} must sign{was}"
        for key in (*keys, *(key for key in old_keys if key not in keys)):
            mark = "-" if key not in keys else "+" if key not in old_keys else " "
            yield f"  {mark} key {key.short}"
        for path in (*paths, *(path for path in old_paths if path not in paths)):
            mark = "-" if path not in paths else "+" if path not in old_paths else " "
            yield f"  {mark} may list {_on_one_line(path)}"


def _check_holder(request: SigningRequest, key: PublicKey) -> None:
    if not any(key in holders.keys for holders in request.holders()):
        expected = f"a key that may sign {request.name}"
        raise SignatureError(
            f"key {key.short[:19]}", expected=expected, got="a key that is not a holder's"
        )
