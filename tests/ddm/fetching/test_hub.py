"""Releases on the Hugging Face Hub: pushed by its own package, fetched within our bounds, signatures intact."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from ddm.errors import AbsentFileError, DigestError, RollbackError, SetupError, TransportError
from ddm.fetching.address import HubAddress, read_address
from ddm.fetching.card import CardAdditions, hub_card
from ddm.fetching.hosted import FetchOptions
from ddm.fetching.hosts import FetchLimits
from ddm.fetching.hub import PushedRelease, push_release
from ddm.fetching.opening import open_hosted
from ddm.io.untrusted import list_files
from ddm.protocol.base import sha256_hex
from ddm.trust.verify import verify_release
from tests.ddm.trust.conftest import PLAN, SignedFederation
from tests.support.hosts import endless, redirecting
from tests.support.hub import LARGE_BYTES, TOKEN, HubState, commit_id, serve_hub

# The package itself calls httpx in a way that httpx advises against.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
ADDRESS = HubAddress("clinic/digits")
EXPERT = f"targets/{PLAN}/silos/north/experts/north/expert.safetensors"
CARD = '---\nlicense: "cc-by-4.0"\ntags: ["federated", "dit"]\n---\n\n# Digits\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    with serve_hub(tmp_path / "hub") as (address, state):
        # The package reads HF_ENDPOINT when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state


@pytest.fixture
def options(tmp_path: Path, limits: FetchLimits) -> FetchOptions:
    return FetchOptions(cache=tmp_path / "cache", state=tmp_path / "state", limits=limits)


def push(federation: SignedFederation, folder: Path) -> PushedRelease:
    """Push the present release, with large experts."""
    if folder.exists():
        shutil.rmtree(folder)
    federation.export(folder)
    card = hub_card(CARD, PLAN, ADDRESS)
    return push_release(folder, list(list_files(folder)), card, ADDRESS, is_private=False)


def test_pushed_release_comes_back_with_its_signatures_and_nothing_else(
    federation, hub, options, tmp_path
) -> None:
    pushed = push(federation, tmp_path / "release")
    files = hub.files("clinic/digits")
    assert {".gitattributes", "README.md"} < set(files)
    assert pushed.num_files == len(files) - 1
    assert "POST /api/validate-yaml" in hub.calls
    hosted = open_hosted(ADDRESS, federation.root, options)
    hosted.fetch_experts()
    verify_release(hosted.folder, federation.root, state=options.state)
    assert set(list_files(hosted.folder)) == set(list_files(tmp_path / "release"))
    # All files are of the commit that the first answer named.
    revisions = [
        request.path.split("/")[4] for request in hub.requests if "resolve" in request.path
    ]
    assert revisions[0] == "main"
    assert set(revisions[1:]) == {commit_id(1)}


def test_large_files_go_as_large_files_and_come_from_the_other_host_without_the_token(
    federation, hub, options, tmp_path
) -> None:
    assert len(federation.files[EXPERT.removeprefix("targets/")]) > LARGE_BYTES
    push(federation, tmp_path / "release")
    assert [call for call in hub.calls if call.startswith("PUT /lfs/put/")]
    assert [call for call in hub.calls if call == "POST /lfs/verify"]
    # The other host refuses a request with a token.
    open_hosted(ADDRESS, federation.root, options).fetch_experts()
    tokens = {request.headers.get("authorization") for request in hub.requests}
    assert tokens == {f"Bearer {TOKEN}", None}


def test_next_version_leaves_nothing_of_the_one_before(federation, hub, tmp_path) -> None:
    push(federation, tmp_path / "release")
    hub.calls.clear()
    federation.publish(manifest=b'{"manifest": 2}', silos=("east",))
    pushed = push(federation, tmp_path / "release")
    assert EXPERT not in hub.files("clinic/digits")
    assert pushed.num_removed == 3
    # One commit, and an expert that was there already is not sent again.
    assert len([call for call in hub.calls if "/commit/" in call]) == 1
    kept = sha256_hex(hub.files("clinic/digits")[EXPERT.replace("north", "east")])
    assert f"PUT /lfs/put/{kept}" not in hub.calls


def test_older_commit_is_refused_after_a_newer_one(federation, hub, options, tmp_path) -> None:
    push(federation, tmp_path / "release")
    federation.publish(manifest=b'{"manifest": 2}')
    push(federation, tmp_path / "release")
    hosted = open_hosted(ADDRESS, federation.root, options)
    hosted.fetch_experts()
    verify_release(hosted.folder, federation.root, state=options.state)
    old = HubAddress("clinic/digits", commit_id(1))
    with pytest.raises(RollbackError):
        open_hosted(old, federation.root, options)


def test_file_of_the_hub_is_bounded_by_its_signed_length(
    federation, hub, options, tmp_path
) -> None:
    push(federation, tmp_path / "release")
    hosted = open_hosted(ADDRESS, federation.root, options)
    hub.answers[EXPERT] = endless
    with pytest.raises(DigestError):
        hosted.fetch_experts()
    hub.answers[EXPERT] = redirecting("file:///etc/passwd")
    with pytest.raises(TransportError):
        hosted.fetch_experts()


def test_absent_repository_is_told(federation, hub, options) -> None:
    with pytest.raises(AbsentFileError):
        open_hosted(HubAddress("nobody/nothing"), federation.root, options)


def test_push_without_a_right_to_write_is_refused(federation, hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(TransportError, match="HTTP status 401"):
        push(federation, tmp_path / "release")


def test_missing_package_and_bad_endpoint_are_told(federation, options, monkeypatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example.org")
    with pytest.raises(SetupError, match="HF_ENDPOINT"):
        open_hosted(ADDRESS, federation.root, options)
    monkeypatch.setattr("ddm.fetching.opening.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="huggingface_hub"):
        open_hosted(ADDRESS, federation.root, options)


def test_card_has_what_the_hub_reads() -> None:
    additions = CardAdditions(("stabilityai/sd-turbo",), ("mnist", "a/b"), ("x-ray",))
    card = hub_card(CARD, PLAN, ADDRESS, additions)
    front_matter = yaml.safe_load(card.split("---\n")[1])
    assert front_matter == {
        "license": "cc-by-4.0",
        "tags": ["federated", "dit", "x-ray"],
        "base_model": ["stabilityai/sd-turbo"],
        "datasets": ["mnist", "a/b"],
    }
    assert "ddm fetch hf://clinic/digits release --root 1.root.json" in card
    assert card.endswith("# Digits\n")
    with pytest.raises(SetupError):
        CardAdditions(data_sets=("a b: c",))
    with pytest.raises(SetupError):
        hub_card("# Digits\n", PLAN, ADDRESS)


def test_address_of_the_hub_is_read_with_its_revision() -> None:
    assert read_address("hf://a/b") == HubAddress("a/b", "main")
    assert read_address("hf://a/b@v2") == HubAddress("a/b", "v2")
    for text in ("hf://a", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x..y"):
        with pytest.raises(SetupError):
            read_address(text)
