"""`model.sig`: one OpenSSF Model Signing signature over a plan's folder, for generic model verification tools.

It is a sigstore bundle with a DSSE envelope around an in-toto statement, as `model_signing` 1.1 reads and writes it, of
the sha256 of every file except the signature itself. TUF states more (which role signs which file, what is current), is
what `ddm verify` relies on, and lists this file like any other. The same files and key give the same bytes: the JSON is
canonical and the ECDSA nonce is deterministic (RFC 6979).
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ddm.errors import DigestError, DocumentError
from ddm.protocol.base import check_json

MODEL_SIGNATURE_NAME = "model.sig"
MAX_MODEL_SIGNATURE_BYTES = 8 * 1024 * 1024
_PAYLOAD_TYPE = "application/vnd.in-toto+json"


def sign_model(name: str, digests: Mapping[str, str], key: ec.EllipticCurvePrivateKey) -> bytes:
    """Sign a folder of files.

    Args:
        name: the plan's id, which tools display and do not check.
        digests: path relative to the folder to sha256, of every file in it except `model.sig`.
        key: a P-256 key.

    Returns:
        The content of `model.sig`.
    """
    payload = _statement(name, digests)
    # DSSE's pre-authentication encoding: the type is signed together with the payload, each after its length.
    signed_bytes = b"DSSEv1 %d %b %d %b" % (
        len(_PAYLOAD_TYPE),
        _PAYLOAD_TYPE.encode(),
        len(payload),
        payload,
    )
    signature = key.sign(signed_bytes, ec.ECDSA(SHA256(), deterministic_signing=True))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {
            "publicKey": {"hint": hashlib.sha256(pem).hexdigest()},
            # No entry in a public log of sigstore: the federation has a log of its own.
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": b64encode(payload).decode("ascii"),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"keyid": "", "sig": b64encode(signature).decode("ascii")}],
        },
    }
    return _canonical(bundle)


def check_model_signature(data: bytes, name: str, digests: Mapping[str, str]) -> None:
    """Refuse a `model.sig` of other files than those that TUF signs; its own signature is not checked here.

    Args:
        data: the file's content.
        name: the plan's id.
        digests: path relative to the plan's folder to sha256, of every signed file except `model.sig`.

    Raises:
        DocumentError: it does not parse as a signature bundle.
        DigestError: it names other files or other digests.
    """
    # Compared as a whole with the statement that we would make: no field of it is interpreted.
    value = check_json(data, subject=MODEL_SIGNATURE_NAME, limit=MAX_MODEL_SIGNATURE_BYTES)
    try:
        payload = value["dsseEnvelope"]["payload"]
    except (KeyError, TypeError) as error:
        raise DocumentError(
            MODEL_SIGNATURE_NAME,
            expected="a sigstore bundle with a DSSE envelope",
            got="a document without dsseEnvelope.payload",
        ) from error
    # The attack: people who use a generic tool are shown a valid signature over other files than ours reads.
    if payload != b64encode(_statement(name, digests)).decode("ascii"):
        raise DigestError(
            MODEL_SIGNATURE_NAME,
            expected=f"a statement of exactly the {len(digests)} files that TUF signs",
            got="a statement of other files or digests",
        )


def _statement(name: str, digests: Mapping[str, str]) -> bytes:
    """Return the canonical in-toto statement; the subject's digest covers the files' digests, sorted by path parts."""
    # As `model_signing` orders them: by path parts, so that `a/b` comes before `a.b`.
    ordered = sorted(digests.items(), key=lambda item: PurePosixPath(item[0]))
    all_digests = b"".join(bytes.fromhex(digest) for _, digest in ordered)
    subject_digest = hashlib.sha256(all_digests).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": subject_digest}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [MODEL_SIGNATURE_NAME],
            },
            "resources": [
                {"name": path, "algorithm": "sha256", "digest": digest} for path, digest in ordered
            ],
        },
    }
    return _canonical(statement)


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
