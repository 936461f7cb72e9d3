"""`aggregator invite`: prints which code is for whom, and writes the invitation anew where it has changed."""

import re
from pathlib import Path

import pytest
from cryptography import x509

from aggregator.config import Federation
from aggregator.membership.invitation import read_own_invitation
from ddm.io.settings import save_settings
from ddm.protocol.base import sha256_file
from ddm.trust.comparison import CodeSubject, comparison_code
from tests.support.commands import CommandResult, run_command
from tests.support.federation_keys import PASSPHRASE, KeyedFederation

NEW_ADDRESS = "new.example.org:9443"


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    keyed = KeyedFederation(tmp_path)
    keyed.found()
    return keyed.federation


def invite(federation: Federation, *options: object) -> CommandResult:
    return run_command("aggregator", "invite", federation.path, *options)


def code_of(label: str, output: str) -> str:
    """Return the six words after a label."""
    line = re.search(rf"^  code of the {label} +((?:[a-z]+ ){{5}}[a-z]+)$", output, re.MULTILINE)
    assert line is not None, output
    return line[1]


def test_both_codes_are_printed_each_with_its_label_and_differ(federation: Federation) -> None:
    path = federation.path / "invitation.json"
    before = path.read_bytes()
    result = invite(federation, "--digests")
    assert result.code == 0, result.err
    for label, subject, digest in (
        ("invitation", CodeSubject.INVITATION, sha256_file(path)),
        ("root", CodeSubject.ROOT, federation.root_digest),
    ):
        assert code_of(label, result.out) == comparison_code(digest, subject)
        assert digest in result.out
    assert code_of("root", result.out) != code_of("invitation", result.out)
    assert path.read_bytes() == before


def test_new_address_gives_the_invitation_another_code_and_leaves_that_of_the_root(
    federation: Federation,
) -> None:
    before = invite(federation)
    after = invite(federation, "--address", NEW_ADDRESS)
    assert after.code == 0, after.err
    assert "rotate" in after.out
    assert code_of("invitation", after.out) != code_of("invitation", before.out)
    assert code_of("root", after.out) == code_of("root", before.out)
    assert read_own_invitation(federation).address == NEW_ADDRESS
    assert (federation.settings().host, federation.settings().port) == ("new.example.org", 9443)
    # Given again it changes nothing.
    assert "has changed" not in invite(federation, "--address", NEW_ADDRESS).out


def test_server_that_listens_elsewhere_than_silos_connect_goes_on_to_do_so(
    federation: Federation,
) -> None:
    settings = federation.settings().model_copy(update={"host": "0.0.0.0", "port": 8443})
    save_settings(settings, federation.path / "federation.toml", "a test")
    assert invite(federation, "--address", NEW_ADDRESS).code == 0
    assert federation.settings() == settings


def test_licence_of_the_settings_comes_into_the_invitation(federation: Federation) -> None:
    settings = federation.settings().model_copy(update={"licence": "CC0-1.0"})
    save_settings(settings, federation.path / "federation.toml", "a test")
    assert "has changed" in invite(federation).out
    assert read_own_invitation(federation).licence == "CC0-1.0"


def test_new_certificate_names_the_new_host_and_the_old_one(federation: Federation) -> None:
    secret = federation.path.parent / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    authority = (federation.path / "tls" / "ca.pem").read_bytes()
    assert invite(federation, "--address", NEW_ADDRESS).code == 0
    words = ("rotate", federation.path, "tls", "--passphrase-file", secret)
    assert run_command("aggregator", *words).code == 0
    pem = (federation.path / "tls" / "server.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "new.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert (federation.path / "tls" / "ca.pem").read_bytes() == authority


def test_text_that_is_no_address_changes_nothing(federation: Federation) -> None:
    before = (federation.path / "invitation.json").read_bytes()
    assert invite(federation, "--address", "new.example.org").code == 3
    assert (federation.path / "invitation.json").read_bytes() == before
