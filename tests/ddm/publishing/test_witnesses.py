"""Witnesses are asked by the real commands, over a socket, and cosign a log that only grew."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.config import Federation, FederationSettings, WitnessSettings
from aggregator.keys.rotation import rotate_key
from ddm.errors import MathError, SetupError, SignatureError, SplitViewError, TransportError
from ddm.io.settings import load_settings, save_settings
from ddm.publishing.log import CHECKPOINT, TransparencyLog
from ddm.publishing.public_log import public_folder
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import cosign
from ddm.trust.log.note import COSIGNATURE, VerifierKey
from ddm.trust.log.witness import Witnesses
from tests.support.commands import CommandResult, run_command
from tests.support.errors import has_subject
from tests.support.federation_keys import PASSPHRASE, KeyedFederation
from tests.support.witness import Witness, run_witness


@pytest.fixture(scope="module")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    keyed = KeyedFederation(tmp_path_factory.mktemp("witnessed"))
    keyed.found()
    keyed.enroll("east")
    (keyed.path / "pass").write_bytes(PASSPHRASE)
    return keyed


@pytest.fixture
def keyed(
    founded_once: KeyedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> KeyedFederation:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return founded_once.copy(tmp_path)


@pytest.fixture
def witness(keyed: KeyedFederation) -> Iterator[Witness]:
    with run_witness("witness.example/w1", [log_key(keyed)]) as server:
        name(keyed.federation, server)
        yield server


def log_key(keyed: KeyedFederation) -> str:
    key = log_key_of(keyed.repository.root())
    assert key is not None
    return key


def name(federation: Federation, *servers: Witness) -> None:
    """Put witnesses into federation.toml."""
    path = federation.path / "federation.toml"
    named = tuple(WitnessSettings(url=server.url, key=server.vkey) for server in servers)
    save_settings(
        load_settings(FederationSettings, path).model_copy(update={"witnesses": named}),
        path,
        "edited",
    )


def log(keyed: KeyedFederation) -> CommandResult:
    """Sign what waits, and ask the witnesses."""
    return run_command(
        "aggregator", "log", keyed.federation.path, "--passphrase-file", keyed.path / "pass"
    )


def read(keyed: KeyedFederation, *more: object) -> CommandResult:
    root = keyed.federation.tuf / "1.root.json"
    state = keyed.path / "state"
    return run_command(
        "ddm", "log", public_folder(keyed.federation), "--root", root, "--state", state, *more
    )


def test_witnesses_cosign_a_log_each_time_it_grew_and_readers_demand_them(
    keyed: KeyedFederation, witness: Witness
) -> None:
    with run_witness("witness.example/w2", [log_key(keyed)]) as second:
        name(keyed.federation, witness, second)
        result = log(keyed)
        assert (
            result.code,
            "Cosigned by witness.example/w1, witness.example/w2." in result.out,
        ) == (
            0,
            True,
        )
        both = ("--witness", witness.vkey, "--witness", second.vkey)
        assert "cosigned by witness.example/w2 at" in read(keyed, *both).out
        rotate_key(keyed.federation, "online", PASSPHRASE)
        assert read(keyed, *both).code == SignatureError.exit_code, (
            "the log has grown, and nobody was asked yet"
        )
        name(keyed.federation, witness)
        assert log(keyed).code == 0
        assert witness.statuses == [200, 409, 200], "it said which size it had seen last"
        assert read(keyed, *both).code == SignatureError.exit_code
        assert read(keyed, *both, "--quorum", 1).code == 0
        assert read(keyed, *both, "--quorum", 3).code == SetupError.exit_code
        sizes = [
            path.name for path in sorted((public_folder(keyed.federation) / "cosigned").iterdir())
        ]
        assert len(sizes) == 2, "readers of an earlier release find the checkpoint of its size"
        assert log(keyed).code == 0
        assert len(note_lines(keyed)) == 2, "a later cosignature takes the place of the earlier one"


def note_lines(keyed: KeyedFederation) -> list[str]:
    return [
        line
        for line in (keyed.federation.path / CHECKPOINT).read_text().splitlines()
        if line[:1] == "\u2014"
    ]


def test_witness_that_saw_a_second_history_says_so(
    keyed: KeyedFederation, witness: Witness, tmp_path: Path
) -> None:
    """The folder is restored from a backup, and goes on differently."""
    before = keyed.copy(tmp_path / "backup")
    rotate_key(keyed.federation, "online", PASSPHRASE)
    assert log(keyed).code == 0
    name(before.federation, witness)
    result = log(before)
    assert (result.code, "restore the newest one" in result.err) == (SplitViewError.exit_code, True)
    rotate_key(before.federation, "online", PASSPHRASE)
    assert log(before).code == SplitViewError.exit_code, "as many entries, and others"
    rotate_key(before.federation, "release", PASSPHRASE)
    assert log(before).code == SplitViewError.exit_code, "more entries, which do not continue"
    assert len(note_lines(before)) == 1 and witness.statuses[-3:] == [409, 409, 422]


@pytest.mark.parametrize(
    ("says", "error", "words"),
    [
        ((404, b""), SetupError, "Ask its operator to add the log"),
        ((403, b""), SetupError, "log_key of the newest root"),
        ((500, b"oops"), TransportError, "HTTP status 500"),
        ((302, b""), TransportError, "HTTP status 302"),
        ((200, b"no signature\n"), None, "signature line"),
        ((200, b"x" * 20_000), None, "at most 16384 bytes"),
        ((200, b""), None, "signature lines"),
        ((409, b"not a number\n"), None, "a number"),
        ((409, b"99999\n"), SplitViewError, "restore the newest one"),
    ],
)
def test_witness_that_answers_otherwise_adds_nothing(
    keyed: KeyedFederation,
    witness: Witness,
    says: tuple[int, bytes],
    error: type[Exception] | None,
    words: str,
) -> None:
    witness.fixed_answer = says
    result = log(keyed)
    assert words in result.err and len(note_lines(keyed)) == 1
    assert result.code == getattr(error, "exit_code", 21)


def test_cosignature_of_another_key_is_not_added(keyed: KeyedFederation, witness: Witness) -> None:
    signed = TransparencyLog.load(keyed.federation).signed
    other = SigningKey.generate()
    assert signed is not None
    foreign = cosign(signed, witness.name, other, 1_700_000_000).note.signatures[-1]
    witness.fixed_answer = (200, str(foreign).encode())
    assert log(keyed).code == SignatureError.exit_code
    assert len(note_lines(keyed)) == 1


def test_absent_witness_is_named_and_the_log_is_signed_all_the_same(keyed: KeyedFederation) -> None:
    with run_witness("witness.example/gone", [log_key(keyed)]) as server:
        name(keyed.federation, server)
    rotate_key(keyed.federation, "online", PASSPHRASE)
    result = log(keyed)
    assert (result.code, "witness.example/gone" in result.err) == (TransportError.exit_code, True)
    assert read(keyed).code == 0


def test_wrong_key_of_a_witness_stops_before_anything_is_signed(
    keyed: KeyedFederation, witness: Witness
) -> None:
    path = keyed.federation.path / "federation.toml"
    log_as_witness = WitnessSettings(url=witness.url, key=log_key(keyed))
    settings = load_settings(FederationSettings, path)
    save_settings(settings.model_copy(update={"witnesses": (log_as_witness,)}), path, "edited")
    result = log(keyed)
    assert (result.code, "a witness's key" in result.err, witness.statuses) == (
        SetupError.exit_code,
        True,
        [],
    )


def test_key_named_twice_is_one_witness() -> None:
    key = SigningKey.generate().public
    names = tuple(VerifierKey(name, key, COSIGNATURE) for name in ("a.example", "b.example"))
    assert Witnesses(names).num_required == 1
    with pytest.raises(MathError, check=has_subject("quorum")):
        Witnesses(names, 2)
