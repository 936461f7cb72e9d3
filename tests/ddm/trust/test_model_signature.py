"""`model.sig` against the public package `model-signing`: the same folder, the same verdict, without our code."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ddm.errors import DigestError, DocumentError
from ddm.protocol.base import sha256_file
from ddm.trust.model_signature import check_model_signature, sign_model
from tests.support.case import case
from tests.support.waiting import LIMIT_S

NAME = "digits-00000001"
FILES = {
    "plan.json": b"{}",
    "plan/centroids.safetensors": b"centroids",
    "plan-b": b"sorts between plan and plan/ as text, not as a path",
    "silos/north/experts/north/expert.safetensors": b"weights" * 1000,
    "silos/north/submission.json": b'{"silo": "north"}',
}
COMMAND = [sys.executable, "-W", "ignore", "-m", "model_signing"]
# `model_signing` reaches for proxies and a home folder; it must need neither.
ENVIRONMENT = {**os.environ, "HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def model(tmp_path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    """A folder with its signature, the public key beside it."""
    folder = tmp_path / NAME
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "model.sig").write_bytes(sign_model(NAME, digests(folder), key))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(pem)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {name: sha256_file(folder / name) for name in FILES}


def verify(
    folder: Path, public: Path | None = None, *options: str
) -> subprocess.CompletedProcess[str]:
    """What a stranger runs: the public package's command line, in a process of its own."""
    public = public or folder.parent / "public.pem"
    arguments = [
        "verify",
        "key",
        str(folder),
        "--signature",
        str(folder / "model.sig"),
        "--public_key",
        str(public),
    ]
    return subprocess.run(
        [*COMMAND, *arguments, *options],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=LIMIT_S,
    )


def refused(folder: Path, word: str, *options: str) -> None:
    result = verify(folder, None, *options)
    assert result.returncode != 0
    assert word in result.stdout + result.stderr


def test_public_package_accepts_our_signature(model: Path) -> None:
    result = verify(model)
    assert result.returncode == 0, result.stdout + result.stderr


def test_public_package_refuses_one_changed_byte(model: Path) -> None:
    weights = model / "silos/north/experts/north/expert.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(model, "Hash mismatch for 'silos/north/experts/north/expert.safetensors'")


def test_public_package_refuses_a_removed_and_an_added_file(model: Path) -> None:
    (model / "plan.json").rename(model / "other.json")
    result = verify(model)
    assert result.returncode != 0
    assert "Extra files" in result.stderr + result.stdout
    assert "Missing files" in result.stderr + result.stdout


def test_public_package_looks_at_git_paths_only_when_told_to(model: Path) -> None:
    """What its users must know: by default it skips them; `ddm verify` refuses them."""
    (model / ".gitattributes").write_text("* -text")
    assert verify(model).returncode == 0
    refused(model, "Extra files", "--no-ignore-git-paths")


def test_public_package_refuses_another_key(model: Path, tmp_path: Path) -> None:
    stranger = ec.generate_private_key(ec.SECP256R1()).public_key()
    (tmp_path / "other.pem").write_bytes(
        stranger.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    assert verify(model, tmp_path / "other.pem").returncode != 0


def test_public_package_refuses_a_statement_that_was_changed_after_signing(model: Path) -> None:
    """The attacker changes a file and its digest alike, and makes the sum over all digests fit."""
    (model / "plan.json").write_bytes(b"{ }")
    own = ec.generate_private_key(ec.SECP256R1())
    forged = json.loads(sign_model(NAME, digests(model), own))
    bundle = json.loads((model / "model.sig").read_bytes())
    bundle["dsseEnvelope"]["payload"] = forged["dsseEnvelope"]["payload"]
    (model / "model.sig").write_text(json.dumps(bundle))
    assert verify(model).returncode != 0


def test_statement_is_the_one_that_the_public_package_makes(
    model: Path, key: ec.EllipticCurvePrivateKey, tmp_path: Path
) -> None:
    private = tmp_path / "private.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    theirs = tmp_path / "theirs.sig"
    ignored = ["--ignore-paths", str(model / "model.sig"), "--no-ignore-git-paths"]
    made = [
        "sign",
        "key",
        str(model),
        "--private_key",
        str(private),
        "--signature",
        str(theirs),
        *ignored,
    ]
    subprocess.run(
        [*COMMAND, *made], check=True, capture_output=True, env=ENVIRONMENT, timeout=LIMIT_S
    )

    def opened(path: Path) -> tuple[dict, dict]:
        bundle = json.loads(path.read_bytes())
        payload = json.loads(base64.b64decode(bundle["dsseEnvelope"].pop("payload")))
        bundle["dsseEnvelope"]["signatures"][0].pop("sig")
        return bundle, payload

    (ours_bundle, ours) = opened(model / "model.sig")
    (their_bundle, their) = opened(theirs)
    assert ours == their
    for bundle in (ours_bundle, their_bundle):  # what is empty may be left out
        bundle["verificationMaterial"].pop("tlogEntries", None)
        bundle["dsseEnvelope"]["signatures"][0].pop("keyid", None)
    assert ours_bundle == their_bundle


def test_same_files_give_the_same_bytes(model: Path, key: ec.EllipticCurvePrivateKey) -> None:
    turned = dict(reversed(digests(model).items()))
    assert sign_model(NAME, turned, key) == (model / "model.sig").read_bytes()
    other = {**turned, "plan.json": "0" * 64}
    assert sign_model(NAME, other, key) != (model / "model.sig").read_bytes()


def test_check_accepts_the_files_that_were_signed_and_no_others(model: Path) -> None:
    data = (model / "model.sig").read_bytes()
    files = digests(model)
    check_model_signature(data, NAME, files)
    changed = {**files, "plan.json": "0" * 64}
    fewer = {name: digest for name, digest in files.items() if name != "plan.json"}
    for others in (changed, fewer, {**files, "more.json": "0" * 64}):
        with pytest.raises(DigestError):
            check_model_signature(data, NAME, others)
    with pytest.raises(DigestError):
        check_model_signature(data, "digits-00000002", files)


def test_check_refuses_what_is_no_bundle() -> None:
    for data in [
        b"",
        b"[]",
        b'{"dsseEnvelope": 3}',
        b'{"dsseEnvelope": {}}',
        b"[" * 100 + b"]" * 100,
    ]:
        with case(data=data), pytest.raises(DocumentError):
            check_model_signature(data, NAME, {})
