"""Attacks with what was signed for another federation: moved over unchanged, it is refused by every program.

A silo's key says who signed. Without a name of the federation in what is signed, anybody could publish a public release
again under a root of trust of their own, and it would verify with the hospitals' true keys: an ensemble of a federation
that they never joined.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import aggregator.planning.carrying
from aggregator.membership.registry import read_cards
from aggregator.planning.carrying import choose_carried
from aggregator.planning.sign import sign_plan
from ddm.errors import FederationError, ReplayError, RootError
from ddm.loading.consistency import ReleaseDocuments, check_documents_agree
from ddm.loading.ensemble import open_ensemble
from ddm.loading.release import Release, open_release
from ddm.protocol.base import sha256_file, sha256_hex
from ddm.protocol.continuation import check_continuation
from ddm.protocol.plan import Plan
from ddm.publishing.public_log import public_folder
from ddm.trust.comparison import CodeSubject, comparison_code
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.commands import CommandResult, run_command
from tests.support.dishonest_aggregator import (
    PUBLIC,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
)
from tests.support.errors import has_subject
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    PlannedFederation,
    TinyFederation,
    make_draft,
    recipe,
    write_policy,
)
from tests.support.stranger import Stranger
from tests.support.submissions import SILO, Arrival

ELSEWHERE = "0" * 64
CODE = FederationError.exit_code
HONEST = UnsignedPlan.honest(clusters_around(PUBLIC[:8]))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """Another federation, which the hospital north joined."""
    return TinyFederation.create(tmp_path_factory.mktemp("other"), {SILO: 40})


# Readers


def pins(published: PublishedRelease) -> list[str]:
    """Pin the true key of each hospital."""
    words = []
    for silo_id in published.tiny.sites:
        fingerprint = published.tiny.key(silo_id).public.fingerprint
        words += ["--silo-key", f"{silo_id}={fingerprint}"]
    return words


@pytest.mark.parametrize("how", ["replace_root", "sign_again"])
def test_release_of_real_hospitals_under_a_strangers_root_is_refused_by_every_reader(
    published_once: PublishedRelease, tmp_path: Path, how: str
) -> None:
    stranger = Stranger(published_once.release, tmp_path / "stranger")
    getattr(stranger, how)()
    look = ("--root", stranger.root, "--state", tmp_path / "state", *pins(published_once))
    commands: dict[str, tuple[object, ...]] = {
        "verify": (),
        "info": ("--json",),
        "sample": ("--num", 1, "--steps", 1, "--out", tmp_path / "a.png"),
        "evaluate": ("--num", 8, "--reference", tmp_path / "none.npz", "--out", tmp_path / "e"),
        "distill": ("--out", tmp_path / "student.safetensors", "--num", 1, "--steps", 1),
    }
    for name, options in commands.items():
        with case(command=name):
            refused = run_command("ddm", name, stranger.copy, *look, *options)
            assert refused.code == CODE, refused
            assert "federation" in refused.err
            assert "Do not use" in refused.err
    with pytest.raises(FederationError, check=has_subject("east.json")):
        open_ensemble(stranger.copy, root=stranger.root)
    # The control: the very same parts, under the root for which they were signed.
    genuine = ("--root", published_once.root, "--state", tmp_path / "state")
    assert run_command("ddm", "verify", published_once.release, *genuine).code == 0


def test_log_of_the_federation_is_not_that_of_a_stranger_whose_root_names_its_key(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    stranger = Stranger(published_once.release, tmp_path / "stranger")
    stranger.replace_root()
    public_log = public_folder(published_once.tiny.federation)
    look = ("ddm", "log", public_log, "--state", tmp_path / "state", "--root")
    refused = run_command(*look, stranger.root)
    assert refused.code == CODE, refused
    assert "entry 0 of the log" in refused.err
    assert run_command(*look, published_once.root).code == 0


def elsewhere(documents: ReleaseDocuments) -> dict[str, ReleaseDocuments]:
    """The documents of a release, one of which names another federation each time."""
    changed = {
        "plan.json": replace(
            documents, plan=documents.plan.model_copy(update={"root_digest": ELSEWHERE})
        )
    }
    for silo_id, submission in documents.submissions.items():
        submissions = dict(documents.submissions)
        submissions[silo_id] = submission.model_copy(update={"root_digest": ELSEWHERE})
        changed[f"submission of {silo_id}"] = replace(documents, submissions=submissions)
    return changed


def test_document_that_names_another_federation_than_its_role_is_refused(
    published_once: PublishedRelease,
) -> None:
    release: Release = open_release(published_once.release, root=published_once.root, state=None)
    documents = ReleaseDocuments(release.plan, release.manifest, release.submissions, {})
    check_documents_agree(release.verified, documents)
    for subject, changed in elsewhere(documents).items():
        with case(document=subject), pytest.raises(FederationError, check=has_subject(subject)):
            check_documents_agree(release.verified, changed)


def test_manifest_that_names_another_plan_is_refused(published_once: PublishedRelease) -> None:
    """The manifest names its federation by its plan."""
    release = open_release(published_once.release, root=published_once.root, state=None)
    manifest = release.manifest.model_copy(update={"plan_digest": ELSEWHERE})
    documents = ReleaseDocuments(release.plan, manifest, release.submissions, {})
    with pytest.raises(ReplayError, check=has_subject("manifest.json")):
        check_documents_agree(release.verified, documents)


# The aggregator


def test_card_of_another_federation_is_not_enrolled(
    other: TinyFederation, published: PublishedRelease
) -> None:
    """The attack: an operator who got a hospital's card for another federation enrolls it without its will."""
    federation = published.tiny.federation
    enrolled = read_cards(federation)
    refused = run_command(
        "aggregator", "enroll", "--yes", federation.path, other.path / f"{SILO}.card.json"
    )
    assert refused.code == CODE, refused
    assert f"card of silo {SILO}" in refused.err
    assert "silo init" in refused.err
    assert read_cards(federation) == enrolled


def test_rotated_card_of_another_federation_is_not_taken_in(
    other: TinyFederation, published: PublishedRelease, tmp_path: Path
) -> None:
    """A hospital that is a silo of both rotated its key in the other one."""
    federation = published.tiny.federation
    secret = tmp_path / "secret"
    out = tmp_path / "rotated.json"
    secret.write_bytes(PASSPHRASE + b"\n")
    site = other.copy(tmp_path / "theirs").sites[SILO]
    result = run_command("silo", "rotate", site.path, "--out", out, "--passphrase-file", secret)
    assert result.code == 0, result.err
    refused = run_command("aggregator", "enroll", "--yes", federation.path, out)
    assert refused.code == CODE, refused
    assert not (federation.registry / "rotated").exists()


def test_submission_that_was_signed_for_another_federation_is_not_the_silos_word_here(
    arrival: Arrival,
) -> None:
    arrival.rewrite(lambda document: None, root_digest=ELSEWHERE)
    arrival.assert_discarded()


def test_submission_whose_document_names_another_federation_is_refused(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(root_digest=ELSEWHERE))
    arrival.assert_refused(FederationError, "submission")


# The silo


REPLACED_FIELDS = {
    "root": ["root"],
    "root and digest": ["root", "root_digest"],
    "all of the root": ["root", "root_digest", "log_key"],
    "certificate authority": ["ca_certificate"],
    "address": ["address"],
    "name": ["federation"],
    "licence": ["licence"],
}


def test_invitation_that_somebody_replaced_on_its_way_makes_no_site(
    other: TinyFederation, published_once: PublishedRelease, tmp_path: Path
) -> None:
    """The attack: whoever carries the invitation replaces a part of it: a silo would send to a server of theirs."""
    path = published_once.tiny.federation.path / "invitation.json"
    genuine = json.loads(path.read_bytes())
    code = comparison_code(sha256_file(path), CodeSubject.INVITATION)
    forger = json.loads((other.federation.path / "invitation.json").read_bytes())
    forger |= {"address": "forger.example.org:9092", "federation": "forged", "licence": "CC0-1.0"}
    data = published_once.tiny.path / "north.npz"
    for name, fields in REPLACED_FIELDS.items():
        with case(replaced=name):
            forged = genuine | {field: forger[field] for field in fields}
            assert forged != genuine
            mailed = tmp_path / "invitation.json"
            mailed.write_text(json.dumps(forged))
            words = ("--id", "north", "--data", data, "--invitation", mailed)
            for spoken in (code, sha256_file(path)):
                refused = run_command("silo", "init", tmp_path / "site", *words, "--code", spoken)
                assert refused.code == RootError.exit_code, refused
                assert not (tmp_path / "site").exists()


def test_code_of_the_root_is_not_taken_for_that_of_the_invitation(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    """The attack: an invitation with another address; its root is the right one, and so is the code of the root."""
    federation = published_once.tiny.federation
    genuine = json.loads((federation.path / "invitation.json").read_bytes())
    mailed = tmp_path / "invitation.json"
    mailed.write_text(json.dumps(genuine | {"address": "forger.example.org:9092"}))
    code = comparison_code(federation.root_digest, CodeSubject.ROOT)
    data = published_once.tiny.path / "north.npz"
    words = ("--id", "north", "--data", data, "--invitation", mailed, "--code", code)
    refused = run_command("silo", "init", tmp_path / "site", *words)
    assert refused.code == RootError.exit_code
    assert "the code of the root, which" in refused.err and "`aggregator invite FED`" in refused.err
    assert not (tmp_path / "site").exists()


def moved(plan: bytes) -> bytes:
    """A plan as it would be signed in another federation."""
    return json.dumps(json.loads(plan) | {"root_digest": ELSEWHERE}).encode()


def test_plan_of_another_federation_is_refused_by_a_silo(aggregator: DishonestAggregator) -> None:
    """The attack: an aggregator of two federations signs the plan of one of them in the other."""
    plan_id = aggregator.deliver(HONEST, rewrite=moved)
    with pytest.raises(FederationError, check=has_subject(f"plan {plan_id}")) as refused:
        aggregator.receive(plan_id)
    assert "Do not accept such a plan" in str(refused.value.remedy)
    assert aggregator.offer(HONEST).plan.root_digest == aggregator.repository.root_digest


@pytest.fixture
def grown(published: PublishedRelease) -> TinyFederation:
    """A federation that a third silo joined, whose next plan carries the others' experts."""
    published.tiny.join("west", 70, 1)
    return published.tiny


def test_experts_of_another_federation_are_not_carried(
    grown: TinyFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a plan carries experts whose silos agreed to later plans of their own federation alone."""
    plan, _ = grown.federation.current_plan()
    chosen = choose_carried(grown.federation, plan.plan_id, ())
    folder = Path(shutil.copytree(chosen.folder, tmp_path / "plan"))
    encoded = moved((folder / "plan.json").read_bytes())
    (folder / "plan.json").unlink()
    (folder / "plan.json").write_bytes(encoded)
    digest = sha256_hex(encoded)
    foreign = replace(
        chosen,
        carried=tuple(entry.model_copy(update={"plan_digest": digest}) for entry in chosen.carried),
        earlier={plan.plan_id: Plan.parse(encoded, subject="plan")},
        folder=folder,
    )
    with pytest.raises(FederationError, check=has_subject("carried from")):
        make_draft(grown.federation, recipe(), foreign, tmp_path / "refused")
    # A dishonest aggregator leaves its own check out; the silo that joins makes it again.
    monkeypatch.setattr(
        aggregator.planning.carrying.CarriedExperts, "check", lambda self, new: None
    )
    draft = make_draft(grown.federation, recipe(), foreign, tmp_path / "draft")
    sign_plan(grown.federation, draft, PASSPHRASE)
    grown.deliver_plan("west", draft.plan.plan_id)
    problem = grown.work("west", until="plan_refused").problem
    assert problem is not None
    assert (problem.code, "carried from" in problem.message) == (CODE, True)


def test_experts_of_another_federation_are_not_trained_on(published_once: PublishedRelease) -> None:
    plan, _ = published_once.tiny.federation.current_plan()
    check_continuation(plan, plan, "north")
    old = plan.model_copy(update={"root_digest": ELSEWHERE})
    with pytest.raises(FederationError, check=has_subject("experts of north")):
        check_continuation(old, plan, "north")


@pytest.fixture
def drafted(planned_once: PlannedFederation, tmp_path: Path) -> TinyFederation:
    """A federation of whose silos one has a draft that waits for a person."""
    tiny = planned_once[0].copy(tmp_path / "copy")
    write_policy(tiny.sites[SILO], POLICY | {"approval": {"kind": "person"}})
    tiny.work(SILO, until="awaiting_approval")
    return tiny


def test_site_whose_root_was_replaced_shows_approves_and_signs_nothing(
    drafted: TinyFederation, other: TinyFederation, tmp_path: Path
) -> None:
    """The attack: whoever writes to the site lets it work for another federation with what it made for its own."""
    site = drafted.sites[SILO]
    digest = str(drafted.state_of(SILO).submission_digest)
    secret = tmp_path / "secret"
    secret.write_bytes(PASSPHRASE + b"\n")

    def approve() -> CommandResult:
        return run_command("silo", "approve", site.path, "--digest", digest)

    shutil.copyfile(other.root, site.root_path)
    acts: dict[str, Callable[[], CommandResult]] = {
        "review": lambda: run_command("silo", "review", site.path),
        "approve": approve,
        "withdraw": lambda: run_command(
            "silo", "withdraw", site.path, "--yes", "--passphrase-file", secret
        ),
    }
    for name, act in acts.items():
        with case(command=name):
            refused = act()
            assert refused.code == CODE, refused
            assert "private/trust/" in refused.err
    with pytest.raises(FederationError):
        drafted.work(SILO)
    assert not list(site.outbox.glob("*/*"))
    # The control: with its own root, all of it goes on.
    shutil.copyfile(drafted.root, site.root_path)
    assert approve().code == 0
    assert drafted.work(SILO).state == "in_outbox"
