"""Releases on hosts, honest and hostile: what is fetched, what is kept, and what is refused before it is fetched."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from ddm.errors import (
    AbsentFileError,
    ArchipelagoError,
    DigestError,
    DocumentError,
    ExpiredError,
    RollbackError,
    RootError,
    SetupError,
    SignatureError,
    TransportError,
    TrustError,
    UnsafePathError,
)
from ddm.fetching.address import WebAddress
from ddm.fetching.cache import default_cache_folder
from ddm.fetching.hosted import FetchOptions, HostedRelease
from ddm.fetching.hosts import FetchLimits
from ddm.fetching.opening import open_hosted, place_of
from ddm.trust.verify import PostponedFiles, verify_release
from tests.ddm.trust.conftest import PLAN, SignedFederation
from tests.support.hosts import HostState, breaking_off, endless, redirecting, replacing

EXPERT = f"{PLAN}/silos/north/experts/north/expert.safetensors"
OTHER = f"{PLAN}/silos/east/experts/east/expert.safetensors"


@pytest.fixture
def options(tmp_path: Path, limits: FetchLimits) -> FetchOptions:
    return FetchOptions(cache=tmp_path / "cache", state=tmp_path / "state", limits=limits)


@pytest.fixture
def www(federation: SignedFederation, state: HostState) -> Path:
    """What the host serves: the release of the federation."""
    return federation.export(state.folder)


def serve_again(federation: SignedFederation, www: Path) -> None:
    shutil.rmtree(www)
    federation.export(www)


def open_at(url: str, federation: SignedFederation, options: FetchOptions) -> HostedRelease:
    return open_hosted(WebAddress(url), federation.root, options)


def verify(hosted: HostedRelease, federation: SignedFederation, options: FetchOptions) -> None:
    """Verify as `open_release` does, and remember what was seen."""
    later = PostponedFiles(lambda path: path.endswith("expert.safetensors"), may_be_absent=True)
    verify_release(hosted.folder, federation.root, state=options.state, later=later)


def refuse(
    kind: type[ArchipelagoError], url: str, federation: SignedFederation, options: FetchOptions
) -> ArchipelagoError:
    with pytest.raises(kind) as refused:
        open_at(url, federation, options)
    assert refused.value.expected
    assert refused.value.got
    return refused.value


def test_documents_come_at_once_and_experts_when_they_are_asked_for(
    federation, www, url, state, options
) -> None:
    hosted = open_at(url, federation, options)
    verify(hosted, federation, options)
    assert not [path for path in state.paths() if path.endswith("expert.safetensors")]
    hosted.fetch_experts([EXPERT])
    assert (hosted.folder / "targets" / EXPERT).read_bytes() == federation.files[EXPERT]
    assert f"/targets/{OTHER}" not in state.paths()
    hosted.fetch_experts()
    verify_release(hosted.folder, federation.root, state=options.state)


def test_partial_copy_is_refused_where_nobody_will_fetch_the_rest(
    federation, www, url, options
) -> None:
    hosted = open_at(url, federation, options)
    with pytest.raises(AbsentFileError):
        verify_release(hosted.folder, federation.root, state=None)


def test_second_time_and_a_later_version_fetch_only_what_changed(
    federation, www, url, state, options
) -> None:
    open_at(url, federation, options).fetch_experts()
    state.requests.clear()
    open_at(url, federation, options).fetch_experts()
    assert not [path for path in state.paths() if path.startswith("/targets")]
    federation.publish(manifest=b'{"manifest": 2}')
    serve_again(federation, www)
    open_at(url, federation, options).fetch_experts()
    assert [path for path in state.paths() if path.startswith("/targets")] == [
        f"/targets/{PLAN}/manifest.json"
    ]


def test_file_that_was_damaged_in_the_cache_is_fetched_again(federation, www, url, options) -> None:
    hosted = open_at(url, federation, options)
    hosted.fetch_experts()
    (hosted.folder / "targets" / EXPERT).write_bytes(b"damaged")
    hosted = open_at(url, federation, options)
    hosted.fetch_experts()
    verify_release(hosted.folder, federation.root, state=None)


def test_interrupted_expert_goes_on_from_its_last_byte(
    federation, www, url, state, options
) -> None:
    hosted = open_at(url, federation, options)
    state.answers[f"/targets/{EXPERT}"] = breaking_off(www / "targets" / EXPERT, 10)
    with pytest.raises(TransportError):
        hosted.fetch_experts([EXPERT])
    state.answers.clear()
    state.requests.clear()
    open_at(url, federation, options).fetch_experts([EXPERT])
    assert [r.start for r in state.requests if r.path == f"/targets/{EXPERT}"] == [20]


def test_progress_counts_every_byte(federation, www, url, options) -> None:
    seen = []
    hosted = open_at(url, federation, options)
    hosted.fetch_experts(on_progress=lambda *numbers: seen.append(numbers))
    total = len(federation.files[EXPERT]) + len(federation.files[OTHER])
    assert seen[-1] == (total, total)


def test_other_root_is_refused_first(federation, make_federation, www, url, state, options) -> None:
    stranger = make_federation()
    refuse(RootError, url, stranger, options)
    assert state.paths() == ["/metadata/1.root.json"]


def test_old_version_is_refused_before_its_files_are_fetched(
    federation, www, url, state, options, tmp_path
) -> None:
    old = shutil.copytree(www, tmp_path / "old")
    federation.publish(manifest=b'{"manifest": 2}')
    serve_again(federation, www)
    verify(open_at(url, federation, options), federation, options)
    shutil.rmtree(www)
    old.rename(www)
    state.requests.clear()
    refuse(RollbackError, url, federation, options)
    assert not [path for path in state.paths() if path.startswith("/targets")]


@pytest.mark.parametrize("name", ["timestamp.json", "snapshot.json", "targets.json", "plans.json"])
def test_metadata_with_a_changed_byte_are_refused(
    federation, www, url, state, options, name
) -> None:
    path = www / "metadata" / name
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"sig":"', b'"sig":"00', 1)[: len(data)])
    with pytest.raises(ArchipelagoError):
        open_at(url, federation, options)
    assert not [path for path in state.paths() if path.startswith("/targets")]


def test_timestamp_of_a_stranger_s_key_is_refused(
    federation, make_federation, www, url, options
) -> None:
    stranger = make_federation()
    stranger.start_plan()
    stranger.publish()
    other = stranger.export(www.parent / "other")
    shutil.copy(other / "metadata" / "timestamp.json", www / "metadata" / "timestamp.json")
    refuse(SignatureError, url, federation, options)


@pytest.mark.parametrize(
    "name", ["1.root.json", "timestamp.json", "snapshot.json", f"{PLAN}.north.json"]
)
def test_endless_metadata_are_refused_within_their_bounds(
    federation, www, url, state, options, name
) -> None:
    state.answers[f"/metadata/{name}"] = endless
    refuse(DocumentError, url, federation, options)
    # What was sent beyond the bound is at most what fits between the two programs.
    assert state.num_bytes < 20_000_000


def test_nested_and_large_numbers_in_metadata_end_in_an_error_of_ours(
    federation, www, url, state, options
) -> None:
    for bomb in (b"[" * 10_000, b'{"signed":' + b"9" * 10_000 + b"}", b"\xff\xfe", b""):
        state.answers["/metadata/timestamp.json"] = replacing(bomb)
        refuse(DocumentError, url, federation, options)


@pytest.mark.parametrize("name", ["../escape", "%2e%2e/escape", "/escape", ".hidden", "a\\b"])
def test_names_that_lead_out_of_the_folder_are_refused(
    federation, www, url, state, options, monkeypatch, tmp_path, name
) -> None:
    # The silo itself signs such a name, and a federation without these checks publishes it.
    monkeypatch.setattr("ddm.trust.silo_role._check_paths", lambda *arguments: None)
    files = federation.silo_files("north")
    escape = f"{PLAN}/silos/north/{name}"
    monkeypatch.setattr(federation, "silo_files", lambda silo_id: {**files, escape: b"x"})
    silo = {"north": federation.silo_metadata("north", version=2)}
    federation.repository.publish(
        PLAN,
        silo,
        {f"{PLAN}/manifest.json": (15, "0" * 64)},
        release_key=federation.keys["release"],
        online_key=federation.keys["online"],
        now=federation.now,
    )
    shutil.rmtree(www)
    federation.repository.export_release(www)
    state.requests.clear()
    refuse(UnsafePathError, url, federation, options)
    assert not [path for path in state.paths() if path.startswith("/targets")]
    assert not list(tmp_path.rglob("*escape*"))


def test_expert_with_other_bytes_or_another_length_is_refused_and_not_laid_out(
    federation, www, url, state, options
) -> None:
    hosted = open_at(url, federation, options)
    good = federation.files[EXPERT]
    for bad in (b"x" + good[1:], good + b"x", good[:-1]):
        state.answers[f"/targets/{EXPERT}"] = replacing(bad)
        with pytest.raises(DigestError):
            hosted.fetch_experts([EXPERT])
        assert not (hosted.folder / "targets" / EXPERT).exists()
    state.answers[f"/targets/{EXPERT}"] = redirecting("http://127.0.0.1:1/expert")
    with pytest.raises(TransportError):
        hosted.fetch_experts([EXPERT])


def test_absent_metadata_are_named(federation, www, url, options) -> None:
    (www / "metadata" / "snapshot.json").unlink()
    assert "snapshot.json" in refuse(AbsentFileError, url, federation, options).subject


def test_expired_release_is_refused_and_read_when_archived(
    make_federation, state, url, options
) -> None:
    old = make_federation()
    old.now -= timedelta(days=91)
    old.start_plan()
    old.publish()
    old.export(state.folder)
    refuse(ExpiredError, url, old, options)
    archived = FetchOptions(
        cache=options.cache, state=options.state, limits=options.limits, archived=True
    )
    open_at(url, old, archived).fetch_experts()


def test_root_that_was_seen_before_is_not_hidden_by_a_host(federation, www, url, options) -> None:
    verify(open_at(url, federation, options), federation, options)
    assert not (www / "metadata" / "2.root.json").exists()
    keys = federation.keys
    from ddm.trust.drafts import Holders
    from ddm.trust.keys import SigningKey
    from ddm.trust.metadata import sign_metadata

    old = shutil.copytree(www, www.parent / "old")
    new_key = SigningKey.generate()
    holders = Holders((new_key.public,))
    draft = federation.repository.next_root(
        {"snapshot": holders, "timestamp": holders}, federation.now
    )
    federation.repository.renew(
        root=sign_metadata(draft, [keys["root"], keys["root2"]]),
        online_key=new_key,
        now=federation.now,
    )
    serve_again(federation, www)
    verify(open_at(url, federation, options), federation, options)
    # The old release again, whose online key was taken away since.
    shutil.rmtree(www)
    old.rename(www)
    with pytest.raises(TrustError):
        open_at(url, federation, options)


def test_folder_of_the_hub_s_cache_gives_the_signed_files_alone(
    federation, tmp_path, options
) -> None:
    blobs = federation.export(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    for path in sorted(blobs.rglob("*")):
        link = snapshot / path.relative_to(blobs)
        if path.is_file():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    (snapshot / ".gitattributes").write_text("*.safetensors filter=lfs")
    (snapshot / "README.md").write_text("# card")
    (snapshot / ".cache").mkdir()
    hosted = open_hosted(snapshot, federation.root, options)
    hosted.fetch_experts()
    verify_release(hosted.folder, federation.root, state=None)
    (snapshot / "targets" / PLAN / "plan.json").unlink()
    os.mkfifo(snapshot / "targets" / PLAN / "plan.json")
    shutil.rmtree(options.cache)
    with pytest.raises(UnsafePathError):
        open_hosted(snapshot, federation.root, options)


def test_cache_is_for_this_user_alone_and_where_it_is_named(
    federation, www, url, options, monkeypatch, tmp_path
) -> None:
    open_at(url, federation, options)
    assert options.cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_folder() == Path("/elsewhere/archipelago")
    monkeypatch.setenv("ARCHIPELAGO_CACHE", "/here")
    assert default_cache_folder() == Path("/here")
    link = tmp_path / "link"
    link.symlink_to(options.cache)
    with pytest.raises(UnsafePathError):
        open_at(url, federation, FetchOptions(cache=link, limits=options.limits))
    # Who can write above it can rename it, and put another one in its place.
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnsafePathError):
        open_at(url, federation, FetchOptions(cache=shared / "own", limits=options.limits))


def test_place_is_a_folder_or_an_address_and_nothing_else(federation, options) -> None:
    assert place_of("release", federation.root, options) == Path("release")
    for text in ("s3://bucket/x", "hf://owner", "hf://a/b@../c", "http://example.org/x"):
        with pytest.raises(SetupError):
            place_of(text, federation.root, options)
