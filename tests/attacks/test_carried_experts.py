"""Growth of a federation from plan to plan, and attacks on it: experts carried past a withdrawal, or into other plans.

The plans are real, and so are their releases; only the pages are short.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tuf.api.exceptions import BadVersionNumberError

import aggregator.planning.carrying
import aggregator.release.publish
from aggregator.intake.inventory import take_inventory
from aggregator.membership.withdrawal import withdraw_silo, withdrawn_silos
from aggregator.planning.carrying import PLAN_IN_FORCE, choose_carried
from aggregator.planning.sign import sign_plan
from aggregator.transfer.delivery import SiloDelivery, TransferLimits
from ddm.distillation.start import initial_weights
from ddm.errors import (
    PolicyError,
    ReplayError,
    RoleError,
    RollbackError,
    SetupError,
    SignatureError,
)
from ddm.loading.earlier_plans import check_origins
from ddm.loading.ensemble import open_ensemble
from ddm.loading.release import Release, open_release
from ddm.protocol.base import now_utc
from ddm.protocol.growth import check_carried, check_consent, differences, standing_of
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, submission_path
from ddm.publishing.keys import load_key
from ddm.transport.messages import StatusQuery
from ddm.trust.metadata import sign_metadata
from ddm.trust.repository import Repository
from ddm.trust.rules import VerifiedMetadata
from ddm.trust.version_store import check_not_removed, load_removed, record_removed
from silo.courier.handlers import SiteLimits, report_status
from silo.worker.withdrawal import withdraw_from_plan
from tests.conftest import PublishedRelease
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, POLICY, make_draft, recipe, write_policy
from tests.support.publishing import publish_short_pages, receipts_key
from tests.support.web_host import serve_folder, tuf_client

LATE = 70  # images of the silo that joins late; more than 60 and fewer than the largest silo's


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_short_pages(monkeypatch)


@pytest.fixture(scope="module")
def grown_once(
    published_once: PublishedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PublishedRelease]:
    """Version 2: a plan that carries east and north over, with west, which joined late."""
    with pytest.MonkeyPatch.context() as patch:
        publish_short_pages(patch)
        tiny = published_once.tiny.copy(tmp_path_factory.mktemp("grown") / "copy")
        tiny.join("west", LATE, 1)
        plan_id = tiny.grow()
        tiny.take_part("west", plan_id)
        tiny.publish(tiny.path / "grown")
        yield PublishedRelease(tiny.path / "grown", tiny.root, plan_id, tiny)


@pytest.fixture
def grown(grown_once: PublishedRelease, tmp_path: Path) -> PublishedRelease:
    """A copy that a test may change."""
    tiny = grown_once.tiny.copy(tmp_path / "copy")
    return PublishedRelease(tiny.path / "grown", tiny.root, grown_once.plan_id, tiny)


def opened(published: PublishedRelease, state: Path | None = None) -> Release:
    return open_release(published.release, root=published.root, state=state)


# Growth


def test_plan_carries_accepted_experts_and_only_the_late_silo_trains(
    grown_once: PublishedRelease, published_once: PublishedRelease, tmp_path: Path
) -> None:
    tiny = grown_once.tiny
    old_id = published_once.plan_id
    release = opened(grown_once, tmp_path / "state")
    assert release.plan.silos == ("west",)
    assert release.plan.members == ("east", "north", "west")
    assert {silo.silo_id: silo.standing for silo in release.manifest.silos} == {
        "east": "carried",
        "north": "carried",
        "west": "late",
    }
    priors = {expert.expert_id: expert.prior for expert in release.manifest.experts}
    assert priors == pytest.approx({"east": 60 / 250, "north": 120 / 250, "west": LATE / 250})
    for silo_id in ("east", "north"):  # signed bytes unchanged, nothing trained, nothing spent
        assert tiny.state_of(silo_id).plan_id == old_id
        ledger = tiny.sites[silo_id].ledger_path
        assert ledger.read_bytes() == (published_once.tiny.sites[silo_id].ledger_path).read_bytes()
        for name in (
            f"metadata/{old_id}.{silo_id}.json",
            f"targets/{old_id}/{submission_path(silo_id)}",
        ):
            assert (grown_once.release / name).read_bytes() == (
                published_once.release / name
            ).read_bytes()
        assert release.submissions[silo_id].plan_id == old_id
    folder, file = initial_weights(
        release, release.plan.expert.architecture, release.plan.condition
    ) or (None, None)
    assert folder == release.folder.parent / old_id  # a student starts from a carried expert too
    assert file == next(
        expert.file for expert in release.manifest.experts if expert.expert_id == "north"
    )
    drawn = open_ensemble(release).sample(6, strategy="full", steps=2, seed=0)
    assert drawn.images.shape == (6, 1, 4, 4)
    assert np.isfinite(drawn.images.numpy()).all()


def test_commands_say_what_each_silo_of_a_grown_plan_is(
    grown_once: PublishedRelease, tmp_path: Path
) -> None:
    trust = ("--root", grown_once.root, "--state", tmp_path / "state")
    assert "none unlisted" in run_command("ddm", "verify", grown_once.release, *trust).out
    info = run_command("ddm", "info", grown_once.release, *trust).out
    old_id = opened(grown_once).plan.origin("east")
    assert f"silo east was carried over from plan {old_id}" in info
    assert "silo west joined with this plan" in info
    weights = ("--prior", "west=3,east=1", "--num", 4, "--steps", 2, "--strategy", "sample")
    drawn = run_command(
        "ddm", "sample", grown_once.release, *trust, *weights, "--out", tmp_path / "drawn.npz"
    )
    assert drawn.code == 0, drawn.err
    status = json.loads(
        run_command("aggregator", "status", grown_once.tiny.federation.path, "--json").out
    )
    assert {silo["silo_id"]: silo["standing"] for silo in status["silos"]} == {
        "east": "carried",
        "north": "carried",
        "west": "accepted",
    }


def test_other_tuf_clients_accept_a_grown_release(
    grown_once: PublishedRelease, tmp_path: Path
) -> None:
    old_id = opened(grown_once).plan.origin("east")
    with serve_folder(grown_once.release.parent / "grown") as server:
        updater = tuf_client(server.url, tmp_path / "client", grown_once.root.read_bytes())
        for path in (f"{grown_once.plan_id}/manifest.json", f"{old_id}/{submission_path('east')}"):
            info = updater.get_targetinfo(path)
            assert info is not None
            assert (
                Path(updater.download_target(info)).read_bytes()
                == (grown_once.release / "targets" / path).read_bytes()
            )


@pytest.mark.slow
def test_replaced_silo_trains_again_and_the_others_go_on(
    grown: PublishedRelease, tmp_path: Path
) -> None:
    tiny = grown.tiny
    write_policy(tiny.sites["east"], {**POLICY, "privacy": {"budget_epsilon": 100.0}})
    plan_id = tiny.grow(replaced=["east"])
    plan, _ = tiny.federation.current_plan()
    assert plan.silos == ("east",)
    assert {carried.silo_id: carried.plan_id for carried in plan.carried} == {
        "north": opened(grown).plan.origin("north"),
        "west": grown.plan_id,
    }
    tiny.take_part("east", plan_id)
    tiny.publish(tmp_path / "third")
    release = open_release(tmp_path / "third", root=grown.root, state=tmp_path / "state")
    assert [silo.standing for silo in release.manifest.silos] == ["again", "carried", "carried"]
    assert release.submissions["east"].plan_id == plan_id


def test_silo_that_never_delivered_is_missing_and_joins_by_growth(
    published: PublishedRelease, tmp_path: Path
) -> None:
    """A partial release: the priors are shares among the silos that are there, for every reader."""
    tiny = published.tiny
    tiny.join("west", LATE, 1)
    plan_id = tiny.grow()
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    words = ("--passphrase-file", secret)
    assert run_command("aggregator", "router", tiny.federation.path).code == 0
    said = run_command(
        "aggregator",
        "publish",
        tiny.federation.path,
        "--rehearsal",
        "--out",
        tmp_path / "partial",
        *words,
    )
    assert "without a submission: west" in said.out
    trust = ("--root", published.root, "--state", tmp_path / "state")
    assert "missing: west" in run_command("ddm", "info", tmp_path / "partial", *trust).out
    partial = open_release(tmp_path / "partial", root=published.root, state=None)
    assert partial.manifest.missing_silos == ("west",)
    assert sum(expert.prior for expert in partial.manifest.experts) == pytest.approx(1.0)
    sample = (
        "ddm",
        "sample",
        tmp_path / "partial",
        *trust,
        "--num",
        4,
        "--steps",
        2,
        "--strategy",
        "lock",
    )
    assert run_command(*sample, "--prior", "equal", "--out", tmp_path / "drawn.npz").code == 0
    absent = run_command(*sample, "--prior", "west=1,east=1", "--out", tmp_path / "other.npz")
    assert absent.code != 0
    assert "west" in absent.err
    second = tiny.grow()
    tiny.take_part("west", second)
    tiny.publish(tmp_path / "whole")
    whole = open_release(tmp_path / "whole", root=published.root, state=tmp_path / "state")
    assert (whole.manifest.missing_silos, len(whole.manifest.silos)) == ((), 3)
    assert whole.plan.plan_id == second != plan_id


# Consent


def test_silo_that_did_not_consent_is_not_carried(published: PublishedRelease) -> None:
    tiny = published.tiny
    folder = tiny.federation.accepted / published.plan_id / "east"
    document = json.loads((folder / submission_path("east")).read_bytes())
    assert document.pop("carry_over") is True
    silent = Submission.model_validate_json(json.dumps(document))
    carried = choose_carried(tiny.federation, published.plan_id, []).carried[0]
    with pytest.raises(ReplayError, match="carry_over"):
        check_consent(carried, silent)


def test_policy_decides_on_consent_and_the_review_shows_it(planned_once, tmp_path: Path) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites["north"]
    write_policy(site, POLICY | {"approval": {"kind": "person", "carry_over": False}})
    tiny.work("north", until="awaiting_approval")
    said = run_command("silo", "review", site.path)
    assert "may not carry them over" in said.out
    draft = json.loads((site.private / "review" / "draft.json").read_bytes())
    assert draft["carry_over"] is False


def test_policy_that_says_nothing_of_later_plans_consents_and_the_review_says_so(
    planned_once, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites["north"]
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    tiny.work("north", until="awaiting_approval")
    said = run_command("silo", "review", site.path)
    assert "may carry these experts and statistics over" in said.out
    assert json.loads((site.private / "review" / "draft.json").read_bytes())["carry_over"] is True


# What an operator is refused


def test_only_the_plan_in_force_is_carried(published: PublishedRelease) -> None:
    with pytest.raises(SetupError, check=has_subject("--carry tiny-")):
        choose_carried(published.tiny.federation, "tiny-00000000", [])
    with pytest.raises(SetupError, check=has_subject("--replace")):
        choose_carried(published.tiny.federation, published.plan_id, ["nobody"])
    by_id = choose_carried(published.tiny.federation, published.plan_id, [])
    by_word = choose_carried(published.tiny.federation, PLAN_IN_FORCE, [])
    assert by_word.carried == by_id.carried


def test_plan_that_carries_everybody_is_refused(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    carrying = choose_carried(tiny.federation, published.plan_id, [])
    with pytest.raises(SetupError, check=has_subject("plan")):
        make_draft(tiny.federation, recipe(), carrying, tmp_path)


def test_carried_silo_takes_its_experts_back_by_itself(grown: PublishedRelease) -> None:
    """It signs that it leaves the plan that it was trained for; the plan in force, which carries it, is another."""
    tiny = grown.tiny
    site = tiny.sites["east"]
    plan, _ = tiny.federation.current_plan()
    withdraw_from_plan(site, tiny.key("east"))
    # Its receipt has arrived, as that of every accepted submission does in time.
    (tiny.federation.receipts / plan.origin("east") / "east" / "1.delivered").touch()
    limits = TransferLimits(shard_bytes=1 << 20, max_submission_bytes=1 << 20, wait_s=0)
    delivery = SiloDelivery(
        tiny.federation.path,
        plan.plan_id,
        "east",
        index=(),
        limits=limits,
        takes_part=False,
        carried_from=plan.origin("east"),
    )
    (query,) = [
        envelope.message
        for envelope in delivery.next_requests([], 4)
        if isinstance(envelope.message, StatusQuery)
    ]
    assert plan.origin("east") != query.plan_id
    delivery.take(query, report_status(query, SiteLimits(site.path, 1, 1, 1)))
    assert withdrawn_silos(tiny.federation, plan) == ()
    tiny.take_in()
    assert withdrawn_silos(tiny.federation, plan) == ("east",)
    carried = choose_carried(tiny.federation, plan.plan_id, []).carried
    assert "east" not in {silo.silo_id for silo in carried}


def test_withdrawn_silo_is_never_carried(published: PublishedRelease) -> None:
    tiny = published.tiny
    withdraw_silo(tiny.federation, "east", "asked us to", receipts_key(tiny))
    assert [
        carried.silo_id
        for carried in choose_carried(tiny.federation, published.plan_id, []).carried
    ] == ["north"]


def test_plan_drafted_before_a_withdrawal_is_not_signed(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    tiny.join("west", LATE, 1)
    carrying = choose_carried(tiny.federation, published.plan_id, [])
    draft = make_draft(tiny.federation, recipe(), carrying, tmp_path)
    withdraw_silo(tiny.federation, "east", "asked us to", receipts_key(tiny))
    with pytest.raises(PolicyError, match="withdrawn"):
        sign_plan(tiny.federation, draft, PASSPHRASE)
    assert tiny.federation.current_plan()[0].plan_id == published.plan_id


CHANGES: dict[str, dict[str, object]] = {
    "data.range": {"data": {"shape": [1, 4, 4], "range": [0.0, 1.0]}},
    "encoder.dim": {"encoder": {"kind": "pca", "dim": 5}},
    "clustering.num_coarse": {"clustering": {"num_fine": 8, "num_coarse": 4}},
    "sketch.rank": {"sketch": {"rank": 5}},
    "partition.min_images": {"partition": {"kind": "silo", "min_images": 11}},
    "condition.kind": {"condition": {"kind": "class", "num_classes": 2}},
    "objective": {"objective": {"prediction": "eps"}},
    "objective.path": {"objective": {"path": "cosine_vp"}},
    "expert.architecture.depth": {
        "expert": recipe().expert.model_dump(mode="json")
        | {"architecture": {"kind": "dit", "patch": 2, "hidden": 16, "depth": 2, "heads": 2}}
    },
    "statistics.counts.epsilon": {
        "statistics": recipe().statistics.model_dump(mode="json")
        | {"counts": {"epsilon": 0.5, "num_groups": 4}}
    },
}


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_recipe_that_gives_carried_experts_another_meaning_is_refused_by_its_field(
    grown_once: PublishedRelease, tmp_path: Path, field: str
) -> None:
    federation = grown_once.tiny.federation
    carrying = choose_carried(federation, grown_once.plan_id, ["west"])
    with pytest.raises((ReplayError, SetupError)) as refused:
        make_draft(federation, recipe(**CHANGES[field]), carrying, tmp_path)
    assert field in str(refused.value)


def test_training_router_and_audit_may_differ(grown_once: PublishedRelease, tmp_path: Path) -> None:
    federation = grown_once.tiny.federation
    expert = recipe().expert.model_dump(mode="json")
    expert["training"] |= {"num_steps": 8, "learning_rate": 0.001}
    other = recipe(
        expert=expert, router={"kind": "counts"}, t_distribution={"kind": "logit_normal"}
    )
    draft = make_draft(
        federation, other, choose_carried(federation, grown_once.plan_id, ["west"]), tmp_path
    )
    assert draft.plan.expert.training.num_steps == 8


# Attacks by the aggregator


def test_silo_refuses_a_plan_that_gives_a_carried_expert_another_meaning(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator's own check is switched off; the late silo makes it again, and so does every reader."""
    tiny = published.tiny
    tiny.join("west", LATE, 1)
    monkeypatch.setattr(
        aggregator.planning.carrying.CarriedExperts, "check", lambda self, new: None
    )
    statistics = recipe().statistics.model_dump(mode="json") | {
        "counts": {"epsilon": 0.5, "num_groups": 4}
    }
    plan_id = tiny.grow(chosen=recipe(statistics=statistics))
    tiny.deliver_plan("west", plan_id)
    problem = tiny.work("west", until="plan_refused").problem
    assert problem is not None
    assert (problem.code, "statistics.counts.epsilon" in problem.message) == (
        ReplayError.exit_code,
        True,
    )
    with pytest.raises(ReplayError, match=r"statistics\.counts\.epsilon"):
        tiny.publish(tmp_path / "never")  # opens the release as a reader does


@pytest.mark.slow
def test_expert_that_came_back_after_its_withdrawal_is_refused_by_readers_and_by_other_tuf_clients(
    grown: PublishedRelease, tmp_path: Path
) -> None:
    """The attack: a silo is withdrawn, readers see a release without it, and a later plan carries its expert again."""
    tiny = grown.tiny
    state = tmp_path / "state"
    metadata = tmp_path / "before"
    cache = tmp_path / "client"
    opened(grown, state)
    shutil.copytree(tiny.federation.path, metadata)
    kept = tiny.copy(tmp_path / "unlawful")  # a copy of the folder in which nothing was withdrawn
    withdraw_silo(tiny.federation, "east", "asked us to", receipts_key(tiny))
    tiny.publish(tmp_path / "without")
    assert open_release(
        tmp_path / "without", root=grown.root, state=state
    ).manifest.withdrawn_silos == ("east",)
    with serve_folder(tmp_path / "without") as server:
        updater = tuf_client(server.url, cache, grown.root.read_bytes())
        assert updater.get_targetinfo(f"{grown.plan_id}/manifest.json") is not None
    for again in range(3):  # versions of timestamp and snapshot grow beyond those that readers saw
        plan_id = kept.grow(replaced=["north" if again % 2 else "west"])
        name = "north" if again % 2 else "west"
        write_policy(kept.sites[name], {**POLICY, "privacy": {"budget_epsilon": 100.0}})
        kept.take_part(name, plan_id)
        kept.publish(tmp_path / f"unlawful-{again}")
    out = tmp_path / "unlawful-2"
    assert "east" in {
        silo.silo_id for silo in open_release(out, root=grown.root, state=None).manifest.silos
    }
    with pytest.raises(RollbackError, check=has_subject(".east.json")):
        open_release(out, root=grown.root, state=state)
    with serve_folder(out) as server:
        updater = tuf_client(server.url, cache, grown.root.read_bytes())
        with pytest.raises(BadVersionNumberError):
            updater.refresh()


def test_role_of_a_plan_that_the_plan_does_not_name_is_refused(
    grown_once: PublishedRelease,
) -> None:
    plan = opened(grown_once).plan
    check_origins(plan, {silo_id: plan.origin(silo_id) for silo_id in plan.members})
    for odd in (
        {"east": plan.plan_id},
        {"west": plan.origin("east")},
        {"stranger": plan.origin("east")},
    ):
        with pytest.raises(RoleError, check=has_subject("metadata/targets.json")):
            check_origins(plan, odd)


def test_two_roles_of_one_silo_are_refused(grown: PublishedRelease) -> None:
    """The attack: the role of the earlier plan stays beside the one under which the silo signs now."""
    repository = Repository(grown.tiny.federation.tuf)
    delegates = repository.delegates()
    other = replace(
        delegates,
        silos={"west": delegates.silos["east"]},
        carried={"west": delegates.carried["east"]},
    )
    targets = repository.next_targets(delegates, now_utc())
    more = repository.next_targets(other, now_utc())
    assert targets.delegations is not None
    assert more.delegations is not None
    targets.delegations.keys |= more.delegations.keys
    targets.delegations.roles = {
        **(targets.delegations.roles or {}),
        **(more.delegations.roles or {}),
    }
    repository.renew(
        targets=sign_metadata(targets, [load_key(grown.tiny.federation, "targets", PASSPHRASE)]),
        online_key=load_key(grown.tiny.federation, "online", PASSPHRASE),
        now=now_utc(),
    )
    repository.export_release(grown.release)
    with pytest.raises(RoleError, check=has_subject("metadata/targets.json")):
        opened(grown)


@pytest.mark.slow
def test_carried_silo_keeps_its_key_and_a_rotation_waits_until_it_signs_anew(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    state = tmp_path / "state"
    opened(published, state)
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    old = tiny.key("east").public
    words = ("--out", tmp_path / "card.json", "--passphrase-file", secret)
    assert run_command("silo", "rotate", tiny.sites["east"].path, *words).code == 0
    assert (
        run_command(
            "aggregator", "enroll", "--yes", tiny.federation.path, tmp_path / "card.json"
        ).code
        == 0
    )
    tiny.join("west", LATE, 1)
    plan_id = tiny.grow()
    assert tiny.federation.delegations()[f"{published.plan_id}.east"] == str(old)
    tiny.take_part("west", plan_id)
    tiny.publish(tmp_path / "grown")
    release = open_release(tmp_path / "grown", root=published.root, state=state)
    assert release.verified.silo_keys["east"] == old.fingerprint
    assert release.verified.notices != ()  # west appeared, and nobody's key changed
    assert not any("east" in words for words in release.verified.notices)
    again = tiny.grow(replaced=["east"])
    assert tiny.federation.delegations()[f"{again}.east"] == str(tiny.key("east").public)


def test_new_size_of_a_carried_silo_counts_although_it_is_on_a_rotated_card(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    card = tmp_path / "card.json"
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    tiny.join("west", LATE, 1)
    draft = make_draft(
        tiny.federation,
        recipe(),
        choose_carried(tiny.federation, published.plan_id, []),
        tmp_path / "plan",
    )
    for words in (("rotate",), ("enroll", "--images", 50)):
        site = tiny.sites["east"].path
        assert (
            run_command(
                "silo", words[0], site, *words[1:], "--out", card, "--passphrase-file", secret
            ).code
            == 0
        )
        assert run_command("aggregator", "enroll", "--yes", tiny.federation.path, card).code == 0
    with pytest.raises(PolicyError, match="agreed size of east"):
        choose_carried(tiny.federation, published.plan_id, [])
    with pytest.raises(PolicyError, match="agreed size of east"):
        sign_plan(tiny.federation, draft, PASSPHRASE)
    assert [
        carried.silo_id
        for carried in choose_carried(tiny.federation, published.plan_id, ["east"]).carried
    ] == ["north"]


def test_aggregators_own_key_for_a_carried_silo_is_refused(
    grown: PublishedRelease, tmp_path: Path
) -> None:
    tiny = grown.tiny
    opened(grown, tmp_path / "state")
    repository = Repository(tiny.federation.tuf)
    delegates = repository.delegates()
    thief = load_key(tiny.federation, "log", PASSPHRASE).public
    targets = repository.next_targets(
        replace(delegates, silos={**delegates.silos, "east": thief}), now_utc()
    )
    repository.renew(
        targets=sign_metadata(targets, [load_key(tiny.federation, "targets", PASSPHRASE)]),
        online_key=load_key(tiny.federation, "online", PASSPHRASE),
        now=now_utc(),
    )
    repository.export_release(grown.release)
    with pytest.raises(SignatureError):
        opened(grown, tmp_path / "state")


def test_removed_carried_silo_leaves_the_next_release(
    grown: PublishedRelease, tmp_path: Path
) -> None:
    tiny = grown.tiny
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    words = ("--reason", "left", "--passphrase-file", secret)
    result = run_command("aggregator", "remove", tiny.federation.path, "east", *words)
    assert result.code == 0, result.err
    assert take_inventory(tiny.federation).withdrawn == ("east",)
    assert not any(role.endswith(".east") for role in tiny.federation.delegations())


# The rules alone


def test_memory_of_removed_roles_refuses_what_a_later_plan_carries_over(tmp_path: Path) -> None:
    """Versions as in a federation whose snapshot removed the role; a rotated snapshot key ends the memory."""

    def resolved(version: int, removed: int | None, key: str = "a" * 64) -> VerifiedMetadata:
        return VerifiedMetadata(
            root_fingerprint="f",
            plan_id="tiny-00000002",
            targets={},
            silo_keys={"east": "k"},
            origins={"east": "tiny-00000001"},
            removed={} if removed is None else {"tiny-00000001.east": removed},
            versions={"tiny-00000001.east": version, "snapshot": 5},
            digests={"snapshot": "d" * 64},
            keys={"snapshot": (key,)},
            roots={},
            expires=now_utc(),
            expired=False,
        )

    check_not_removed(load_removed(tmp_path), resolved(1, None))
    record_removed(tmp_path, resolved(3, 2))
    record_removed(tmp_path, resolved(3, None))
    with pytest.raises(RollbackError, check=has_subject("metadata/tiny-")):
        check_not_removed(load_removed(tmp_path), resolved(1, None))
    check_not_removed(load_removed(tmp_path), resolved(2, None))
    check_not_removed(load_removed(tmp_path), resolved(1, None, key="b" * 64))


def test_differences_are_those_that_change_the_meaning(grown_once: PublishedRelease) -> None:
    new = opened(grown_once)
    old = new.earlier_plans[new.plan.origin("east")]
    carried = new.plan.carried[0]
    assert differences(old, new.plan, "east") == []
    check_carried(carried, old, new.plan)
    with pytest.raises(ReplayError, check=has_subject("licence")):
        check_carried(carried, old, new.plan.model_copy(update={"licence": "CC0-1.0"}))
    fields = new.plan.model_dump(mode="json")
    for path, value in (
        ("plan/sketch.safetensors", "0" * 64),
        ("plan/encoder.safetensors", "1" * 64),
    ):
        files = [
            file | ({"digest": value} if file["path"] == path else {}) for file in fields["files"]
        ]
        spoilt = Plan.model_validate_json(json.dumps(fields | {"files": files}))
        assert [name for name, _, _ in differences(old, spoilt, "east")] == [f"files.{path}"]
    with pytest.raises(ReplayError, check=has_subject("plan tiny-")):
        check_carried(carried.model_copy(update={"silo_id": "west"}), old, new.plan)
    assert standing_of(old, {}, "east") == "new"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"carried": 2}, "sorted, distinct"),
        ({"silos": ["east", "west"]}, "do not train"),
        ({"agreed": {}}, "agreed"),
        ({"digest": "0" * 64}, "digests that carried names"),
    ],
)
def test_plan_with_an_inconsistent_list_of_carried_silos_is_refused(
    grown_once: PublishedRelease, change: dict[str, object], words: str
) -> None:
    fields = opened(grown_once).plan.model_dump(mode="json")
    if "carried" in change:
        fields["carried"] = fields["carried"][:1] * 2
    elif "digest" in change:
        fields["carried"] = [
            carried | {"plan_digest": change["digest"]} for carried in fields["carried"]
        ]
    else:
        fields |= change
    with pytest.raises(ValueError, match=words):
        Plan.model_validate_json(json.dumps(fields))
