"""A plan whose experts start from a base, and the next plan that starts from one of these: two silos, in process."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tomli_w
import torch

from aggregator.config import Federation
from aggregator.intake.examination import Examiner
from aggregator.intake.own_files import FederationFilesError
from aggregator.intake.screening import absolute_faults
from aggregator.keys.removal import remove_silo
from aggregator.membership.withdrawal import withdraw_silo
from aggregator.planning import released_base
from aggregator.planning.released_base import (
    MAX_COMPARED_IMAGES,
    compare_experts,
    draw_compared_images,
    silos_that_left,
    student_source,
    verify_base_release,
)
from aggregator.setup import init_federation
from ddm.distillation.student import GivenImages, OwnSamples, Student, StudentOrigin
from ddm.errors import DigestError, DocumentError, PolicyError, ReplayError, SetupError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.release import Release, open_release
from ddm.models import build_expert
from ddm.planning.recipe import ReleaseBaseRecipe
from ddm.planning.released_base import expert_source, silos_without_consent, teachers_of
from ddm.protocol.architecture import Dit
from ddm.protocol.base import File, sha256_file
from ddm.protocol.bases import ExpertBase, FileBase, StudentBase, TrainedBase
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.continuation import check_continuation
from ddm.protocol.growth import stated_bases
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedExpert
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.publishing.keys import load_key
from tests.support.commands import run_command
from tests.support.documents import to_bytes
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    images,
    make_draft,
    recipe,
    write_policy,
)

NOBODY: frozenset[str] = frozenset()
SIZES = {"east": 60, "north": 90}
ARCHITECTURE = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
TRAINING = {
    # After 20 steps the images that experts drew were nearly as far from all public ones as screening allows.
    "num_steps": 60,
    "batch_size": 8,
    "weight_decay": 0.0,
    "ema_decay": 0.5,
    "warmup_steps": 0,
    "schedule": "constant",
    "precision": "fp32",
}
COUNTED = {
    "unit": "image",
    "total": {"epsilon": 8.0, "delta": 0.0},
    "counts": {"epsilon": 4.0, "num_groups": 4},
}


APPROVAL = {"kind": "policy", "carry_over": True, "serve_as_base": True}


class Round(NamedTuple):
    """A federation that published experts which started from a base."""

    tiny: TinyFederation
    release: Path
    opened: Release

    def weights(self, silo_id: str) -> dict[str, torch.Tensor]:
        (expert,) = [expert for expert in self.opened.manifest.experts if expert.silo_id == silo_id]
        path = self.opened.folder / expert.file.path
        return load_tensors(path, None, max_bytes=expert.file.bytes)


def tables(**changes: object) -> dict[str, object]:
    expert = {"architecture": ARCHITECTURE, "training": TRAINING}
    return {"expert": expert, "statistics": COUNTED, "router": {"kind": "counts"}} | changes


def file_base(path: Path, **changes: object) -> dict[str, object]:
    stated = {"licence": "CC0-1.0", "num_images": 240, "source": "made-net-1"}
    return {"kind": "file", "file": str(path), **stated} | changes


def made_base(path: Path) -> dict[str, torch.Tensor]:
    network = build_expert(Dit.model_validate(ARCHITECTURE), (1, 4, 4), seed=7)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=random))
    save_tensors(path, network.state_dict())
    return network.state_dict()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Round:
    """The first round: experts started from a file, and north alone agrees to serve as a base."""
    folder = tmp_path_factory.mktemp("base")
    tiny = TinyFederation.create(folder / "tiny", SIZES)
    write_policy(tiny.sites["north"], POLICY | {"approval": APPROVAL})
    made_base(folder / "base.safetensors")
    chosen = recipe(**tables(base=file_base(folder / "base.safetensors")))
    tiny.complete(folder / "release", chosen)
    opened = open_release(folder / "release", root=tiny.root, state=None)
    return Round(tiny, folder / "release", opened)


def test_experts_start_from_the_base_and_all_of_their_weights_are_trained(
    first: Round, tmp_path: Path
) -> None:
    base = made_base(tmp_path / "base.safetensors")
    # Half of what a transformer of this width has from random weights.
    rate = first.opened.plan.expert.training.learning_rate
    assert rate == 0.5 * 0.5 / 16
    for silo_id in SIZES:
        trained = first.weights(silo_id)
        moved = {name: float((trained[name] - base[name]).abs().max()) for name in base}
        assert all(move > 0 for move in moved.values()), moved
        # AdamW moves a weight by little more than its rate in a step.
        assert max(moved.values()) < 2 * TRAINING["num_steps"] * rate  # type: ignore[operator]


@pytest.mark.parametrize("num_left", [0, 100, None])
def test_nobody_is_answered_for_a_damaged_base_of_the_plan(
    tmp_path: Path, num_left: int | None
) -> None:
    """A base that is cut off, or whose last byte is another one, is no fault of the silo."""
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 60})
    write_policy(tiny.sites["north"], POLICY)
    made_base(tmp_path / "base.safetensors")
    plan_id = tiny.sign(recipe(**tables(base=file_base(tmp_path / "base.safetensors"))))
    tiny.deliver_plan("north", plan_id)
    tiny.work("north")
    tiny.collect("north", plan_id)
    base_path = tiny.federation.plan_targets(plan_id) / "plan/base.safetensors"
    before = base_path.read_bytes()
    damaged = before[:-1] + bytes([before[-1] ^ 1])
    base_path.write_bytes(damaged[:num_left])
    with pytest.raises(FederationFilesError):
        tiny.take_in()
    assert not list((tiny.federation.attempts / plan_id).rglob("[0-9]*"))
    base_path.write_bytes(before)
    (receipt,) = tiny.take_in()
    assert receipt.verdict.kind == "accepted"


def test_plan_manifest_card_and_info_state_the_base(first: Round) -> None:
    plan = first.opened.plan
    manifest = first.opened.manifest
    assert plan.base is not None and manifest.base == plan.base
    assert isinstance(plan.base.origin, FileBase)
    assert plan.base.digest == plan.file("plan/base.safetensors").digest
    assert (plan.base.licence, plan.base.num_images) == ("CC0-1.0", 240)
    shown = run_command("ddm", "info", first.release, "--root", first.tiny.root)
    card = (first.opened.folder / "README.md").read_text("utf-8")
    for text in (shown.out, card):
        assert plan.base.digest[:16] in text and "240 images" in text and "CC0-1.0" in text
        assert "made-net-1" in text


def write_public(path: Path) -> Path:
    """Write public images like the silos', so that screening takes no honest expert's images for foreign ones."""
    centres = [images(120, centre, seed=90) for centre in (-0.5, 0.5)]
    np.savez(path, images=np.concatenate(centres))
    return path


def write_recipe(path: Path, **changes: object) -> Path:
    described = recipe(**tables(**changes)).model_dump(mode="json", exclude_none=True)
    # The rate that follows from the start, instead of the one that a recipe of tests states.
    described["expert"]["training"].pop("learning_rate")
    path.write_bytes(tomli_w.dumps(described).encode())
    return path


def test_base_trained_on_public_images_leads_to_a_release_that_states_it(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES)
    base = {
        "kind": "trained",
        "folder": str(tmp_path / "base"),
        "licence": "CC-BY-4.0",
        "training": {"num_steps": 12, "batch_size": 8, "precision": "fp32"},
    }
    chosen = write_recipe(tmp_path / "plan.toml", base=base)
    public = write_public(tmp_path / "public.npz")
    words = [tiny.federation.path, "--recipe", chosen, "--public", public]
    trained = run_command("aggregator", "base", *words, "--device", "cpu")
    assert trained.code == 0, trained.err
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    signed = run_command("aggregator", "plan", *words, "--passphrase-file", secret, "--yes")
    assert signed.code == 0, signed.err

    plan_id = tiny.current_plan_id()
    for silo_id in SIZES:
        tiny.take_part(silo_id, plan_id)
    tiny.publish(tmp_path / "release")
    release = open_release(tmp_path / "release", root=tiny.root, state=None)
    stated = release.manifest.base
    assert stated is not None
    assert isinstance(stated.origin, TrainedBase)
    # A quarter of the 240 public images is held out to judge routers and experts.
    assert (stated.licence, stated.num_images) == ("CC-BY-4.0", 180)
    card = (release.folder / "README.md").read_text("utf-8")
    (line,) = [line for line in card.splitlines() if stated.digest[:16] in line]
    assert "180 images" in line and "CC-BY-4.0" in line

    # The silos got the weights that the first command wrote.
    written = tmp_path / "base" / "base.safetensors"
    assert stated.origin.digest == sha256_file(written)
    weights = load_tensors(written, None, max_bytes=1 << 20)
    sent_path = tiny.federation.plan_targets(plan_id) / "plan/base.safetensors"
    sent = load_tensors(sent_path, None, max_bytes=1 << 20)
    assert sent.keys() == weights.keys()
    assert all(torch.equal(sent[name], weights[name]) for name in weights)


def plan_from_release(tiny: TinyFederation, release: Path, folder: Path) -> list[object]:
    """The command that plans a training from an expert of a release."""
    public = write_public(folder / "public.npz")
    chosen = write_recipe(folder / "plan.toml")
    secret = folder / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    words = ["aggregator", "plan", tiny.federation.path, "--recipe", chosen, "--public", public]
    return [*words, "--from-release", release, "--passphrase-file", secret, "--yes"]


@pytest.mark.parametrize("departure", ["withdrawn", "removed"])
def test_expert_of_a_silo_that_left_is_no_base_of_a_later_plan(
    first: Round, tmp_path: Path, departure: str
) -> None:
    """The attack: what a silo took back returns in every expert of the next plan, by way of an old release."""
    tiny = first.tiny.copy(tmp_path / "tiny")
    federation = tiny.federation
    if departure == "withdrawn":
        withdraw_silo(federation, "north", "a test", load_key(federation, "receipts", PASSPHRASE))
    else:
        remove_silo(federation, "north", "a test", PASSPHRASE)
    words = plan_from_release(tiny, first.release, tmp_path)
    # The silo that agreed is the one that left, so that nobody is there to propose either.
    for options in (("--expert", "north"), ()):
        refused = run_command(*words, *options)
        assert refused.code == PolicyError.exit_code, refused.err
        assert "north" in refused.err
    assert silos_that_left(federation, first.opened) == {"north"}
    assert silos_that_left(first.tiny.federation, first.opened) == NOBODY


def test_expert_of_a_release_becomes_the_base_of_the_next_plan(
    first: Round, tmp_path: Path
) -> None:
    tiny = first.tiny.copy(tmp_path / "tiny")
    words = plan_from_release(tiny, first.release, tmp_path)
    # Of both silos one agreed, so that there is one to propose.
    refused = run_command(*words, "--expert", "east")
    assert refused.code == PolicyError.exit_code and "serve_as_base" in refused.err
    signed = run_command(*words)
    assert signed.code == 0, signed.err
    assert "loss on public images" in signed.out and "expert north of north" in signed.out

    plan, _ = tiny.federation.current_plan()
    assert plan.base is not None
    origin = plan.base.origin
    assert isinstance(origin, ExpertBase)
    assert (origin.expert_id, origin.silos) == ("north", ("north",))
    assert origin.manifest == first.opened.manifest_digest
    assert plan.base.licence == first.opened.manifest.licence
    base_path = tiny.federation.plan_targets(plan.plan_id) / "plan/base.safetensors"
    base = load_tensors(base_path, None, max_bytes=1 << 20)
    north = first.weights("north")
    assert all(torch.equal(base[name], north[name]) for name in north)


@pytest.fixture(scope="module")
def second(first: Round, tmp_path_factory: pytest.TempPathFactory) -> Round:
    """The next round: both silos started from north's expert of the first one, and both agree to serve as a base."""
    folder = tmp_path_factory.mktemp("second")
    tiny = first.tiny.copy(folder / "tiny")
    write_policy(tiny.sites["east"], POLICY | {"approval": APPROVAL})
    signed = run_command(*plan_from_release(tiny, first.release, folder), "--expert", "north")
    assert signed.code == 0, signed.err
    for silo_id in SIZES:
        tiny.take_part(silo_id, tiny.current_plan_id())
    tiny.publish(folder / "release")
    opened = open_release(folder / "release", root=tiny.root, state=None)
    return Round(tiny, folder / "release", opened)


def test_base_of_a_second_round_names_the_silo_of_the_first_one(second: Round) -> None:
    assert second.opened.manifest.base == second.opened.plan.base
    source = expert_source(second.opened, "east", NOBODY)
    assert isinstance(source.origin, ExpertBase)
    assert source.origin.silos == ("east", "north")
    assert not source.origin.trained_privately
    # The chain goes on: a base of the third round, as its plan would state it.
    base = second.opened.plan.base
    assert base is not None
    third_base = base.model_copy(update={"origin": source.origin})
    third_plan = second.opened.plan.model_copy(update={"base": third_base})
    third = expert_source(replace(second.opened, plan=third_plan), "north", NOBODY)
    assert isinstance(third.origin, ExpertBase)
    assert third.origin.silos == ("east", "north")


def test_expert_that_learned_from_a_removed_silo_in_an_earlier_round_is_no_base(
    second: Round, tmp_path: Path
) -> None:
    """The attack: what a removed silo taught returns by way of another silo's expert, of a later round."""
    # The control.
    assert silos_that_left(second.tiny.federation, second.opened) == NOBODY
    assert expert_source(second.opened, "east", NOBODY).num_images is not None

    tiny = second.tiny.copy(tmp_path / "tiny")
    remove_silo(tiny.federation, "north", "a test", PASSPHRASE)
    words = plan_from_release(tiny, second.release, tmp_path)
    for options in (("--expert", "east"), ()):
        refused = run_command(*words, *options)
        assert refused.code == PolicyError.exit_code, refused.err
        assert "left: " in refused.err and "north" in refused.err


def test_silo_that_only_an_earlier_round_has_is_known_to_have_left(
    second: Round, tmp_path: Path
) -> None:
    tiny = second.tiny.copy(tmp_path / "tiny")
    remove_silo(tiny.federation, "north", "a test", PASSPHRASE)
    # A release in which north takes no part, after a round that started from north's expert.
    submissions = {"east": second.opened.submissions["east"]}
    without_north = replace(second.opened, submissions=submissions)
    assert silos_that_left(tiny.federation, without_north) == {"north"}
    assert silos_that_left(second.tiny.federation, without_north) == NOBODY


def test_card_and_info_state_the_bases_of_late_and_of_carried_experts(
    first: Round, tmp_path: Path
) -> None:
    tiny = first.tiny.copy(tmp_path / "tiny")
    tiny.join("west", 40, 1)
    made_base(tmp_path / "late.safetensors")
    late_base = file_base(tmp_path / "late.safetensors", num_images=77)
    plan_id = tiny.grow(chosen=recipe(**tables(base=late_base)))
    tiny.take_part("west", plan_id)
    tiny.publish(tmp_path / "grown")
    grown = open_release(tmp_path / "grown", root=tiny.root, state=None)
    first_id = first.opened.plan.plan_id
    card = (grown.folder / "README.md").read_text("utf-8")
    shown = run_command("ddm", "info", tmp_path / "grown", "--root", tiny.root).out
    for text in (card, shown):
        lines = [line for line in text.splitlines() if "started from" in line]
        assert len(lines) == 2
        assert "the experts trained for this plan started from" in lines[0]
        assert "77 images" in lines[0]
        carried = f"the experts carried over from plan {first_id} (east, north) started from"
        assert carried in lines[1]
        assert "240 images" in lines[1]

    # Only experts that are carried over, only late ones, or none of them started from a base.
    earlier = grown.earlier_plans
    unbased = grown.plan.model_copy(update={"base": None})
    unbased_earlier = {first_id: earlier[first_id].model_copy(update={"base": None})}
    (only_carried,) = stated_bases(unbased, earlier, {"east", "west"})
    assert only_carried.base == first.opened.plan.base
    assert only_carried.experts.endswith("(east)")
    (only_late,) = stated_bases(grown.plan, unbased_earlier, {"east", "west"})
    assert only_late.base == grown.plan.base == grown.manifest.base
    assert stated_bases(unbased, unbased_earlier, {"east", "west"}) == []
    assert stated_bases(unbased, earlier, {"west"}) == []


def test_plan_does_not_train_on_experts_whose_base_it_would_not_state(
    second: Round, tmp_path: Path
) -> None:
    """The attack: round 2 starts from north's expert; a round 3 of `own` experts states no base, and no north."""
    old = second.opened.plan
    adaptation = {"kind": "own", "plan_id": old.plan_id}
    expert = {"architecture": ARCHITECTURE, "training": TRAINING | {"learning_rate": 0.002}}
    chosen = recipe(**tables(expert=expert | {"adaptation": adaptation}))
    public = torch.from_numpy(images(120, 0.0, seed=90))
    with pytest.raises(ReplayError) as caught:
        make_draft(second.tiny.federation, chosen, public, tmp_path)
    assert "expert north of north" in (caught.value.got or "")

    # The silo's own rule, for a plan that was signed all the same; the control is an old plan without a base.
    document = json.loads(old.encode())
    document["base"] = None
    document["files"] = [file for file in document["files"] if "base" not in file["path"]]
    document["expert"]["adaptation"] = {"kind": "full", "base": None}
    unbased = Plan.parse(to_bytes(document), subject="plan")
    document["expert"]["adaptation"] = adaptation
    document["expert"]["adaptation"]["submissions"] = {"east": "0" * 64}
    new = Plan.parse(to_bytes(document), subject="plan")
    check_continuation(unbased, new, "east")
    with pytest.raises(ReplayError, match="to be trained on"):
        check_continuation(old, new, "east")


@pytest.mark.parametrize("withdrawn", [False, True])
def test_expert_that_a_silo_sent_is_refused_as_a_file_of_the_operators(
    first: Round, tmp_path: Path, withdrawn: bool
) -> None:
    """The attack: a file needs no consent, returns after a withdrawal, and counts as trained on no silo's images."""
    tiny = first.tiny.copy(tmp_path / "tiny")
    (expert,) = [row for row in first.opened.manifest.experts if row.silo_id == "east"]
    shutil.copy(first.opened.folder / expert.file.path, tmp_path / "mine.safetensors")
    if withdrawn:
        key = load_key(tiny.federation, "receipts", PASSPHRASE)
        withdraw_silo(tiny.federation, "east", "a test", key)
    chosen = recipe(**tables(base=file_base(tmp_path / "mine.safetensors")))
    with pytest.raises(PolicyError) as caught:
        tiny.sign(chosen)
    assert "east" in (caught.value.got or "") and "--from-release" in (caught.value.remedy or "")


def test_base_of_an_earlier_plan_that_came_from_a_release_is_refused_as_a_file(
    first: Round, tmp_path: Path
) -> None:
    """The attack: adjusted to classes, it has another digest than north's expert, whose images it learned."""
    tiny = first.tiny.copy(tmp_path / "tiny")
    classes = {"condition": {"kind": "class", "num_classes": 2}}
    words = plan_from_release(tiny, first.release, tmp_path)
    write_recipe(tmp_path / "plan.toml", **classes)
    signed = run_command(*words, "--expert", "north")
    assert signed.code == 0, signed.err
    plan, _ = tiny.federation.current_plan()
    assert plan.base is not None and "2 classes added" in plan.base.changes[0]
    remove_silo(tiny.federation, "north", "a test", PASSPHRASE)
    base_path = tiny.federation.plan_targets(plan.plan_id) / "plan/base.safetensors"
    chosen = recipe(**tables(base=file_base(base_path), **classes))
    with pytest.raises(PolicyError) as caught:
        tiny.sign(chosen)
    assert f"the base of plan {plan.plan_id}: expert north" in (caught.value.got or "")
    assert "--from-release" in (caught.value.remedy or "")


def test_release_of_another_federation_is_no_base(first: Round, tmp_path: Path) -> None:
    """Its silos agreed to plans of their own federation, and only there is it known whether one has left."""
    other = Federation(tmp_path / "other")
    settings = first.tiny.federation.settings().model_copy(update={"name": "other"})
    init_federation(other, settings, PASSPHRASE)
    chosen = ReleaseBaseRecipe(
        kind="release", release=str(first.release), root=str(first.tiny.root)
    )
    with pytest.raises(PolicyError) as caught:
        verify_base_release(other, chosen)
    assert caught.value.expected == "a release of this federation, or of islands"
    assert verify_base_release(first.tiny.federation, chosen).plan == first.opened.plan


def test_experts_are_compared_on_public_images_where_their_silos_agreed(first: Round) -> None:
    chosen = ReleaseBaseRecipe(kind="release", release=str(first.release))
    release = verify_base_release(first.tiny.federation, chosen)
    public = torch.from_numpy(images(40, 0.0, seed=3))
    data = release.plan.data
    compared = compare_experts(release, public, data, NOBODY)
    assert [expert.expert_id for expert in compared] == ["north"]
    for changes in ({"range": (0.0, 1.0)}, {"shape": (1, 8, 8)}):
        with pytest.raises(SetupError, match="as in the release"):
            compare_experts(release, public, data.model_copy(update=changes), NOBODY)
    assert 0 < compared[0].loss < 10
    with pytest.raises(SetupError) as caught:
        expert_source(release, "nobody", NOBODY)
    assert caught.value.subject.startswith("--expert")


def test_expert_whose_answers_are_not_numbers_is_proposed_last(
    first: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: NaN is not above any loss, so that such an expert could be the best one."""
    experts = first.opened.manifest.experts
    monkeypatch.setattr(released_base, "consenting_experts", lambda release, left: experts)
    losses = iter([float("nan"), 0.5])
    monkeypatch.setattr(released_base, "velocity_loss", lambda *_: next(losses))
    public = torch.from_numpy(images(4, 0.0, seed=3))
    compared = compare_experts(first.opened, public, first.opened.plan.data, NOBODY)
    assert [expert.expert_id for expert in compared] == ["north", "east"]


@pytest.mark.parametrize("block_size", [1000, 37])
def test_experts_are_compared_on_images_of_every_class_where_these_are_sorted(
    block_size: int,
) -> None:
    """The fault: of public images in the order of their classes, the first ones are of a single class."""
    classes = torch.arange(1000) // 250
    sorted_images = classes.float()[:, None, None, None].expand(-1, 1, 4, 4)
    drawn = draw_compared_images(sorted_images.split(block_size), len(sorted_images))
    assert drawn.shape == (MAX_COMPARED_IMAGES, 1, 4, 4)
    count_of_class = drawn[:, 0, 0, 0].long().bincount(minlength=4)
    # 64 expected; the standard deviation without replacement is 6.
    assert all(64 - 24 < count < 64 + 24 for count in count_of_class.tolist()), count_of_class
    # Fewer images are all taken, each once.
    few = torch.arange(40.0)[:, None]
    assert torch.equal(draw_compared_images(few.split(7), 40), few)


def test_private_training_does_not_start_from_what_learned_the_same_images_openly(
    first: Round,
) -> None:
    document = json.loads(first.opened.plan.encode())
    document["expert"]["privacy"] = {
        "kind": "dp_sgd",
        "epsilon": 1.0,
        "delta": 1e-6,
        "clip": 1.0,
        "units_per_step": 4,
        "images_per_unit": 1,
        "draws": 1,
    }
    assert Plan.parse(to_bytes(document), subject="plan").base is not None
    document["base"]["origin"] = {
        "kind": "expert",
        "root": "0" * 64,
        "plan_id": "digits-0123abcd",
        "version": 1,
        "manifest": "0" * 64,
        "silos": ["north"],
        "digest": "0" * 64,
        "trained_privately": True,
        "expert_id": "north",
    }
    assert Plan.parse(to_bytes(document), subject="plan").base is not None
    document["base"]["origin"]["trained_privately"] = False
    with pytest.raises(DocumentError):
        Plan.parse(to_bytes(document), subject="plan")


def test_base_under_a_licence_that_the_releases_do_not_keep_is_refused_in_planning(
    first: Round, tmp_path: Path
) -> None:
    made_base(tmp_path / "base.safetensors")
    tiny = first.tiny.copy(tmp_path / "tiny")
    shared = file_base(tmp_path / "base.safetensors", licence="CC-BY-NC-4.0")
    with pytest.raises(SetupError) as caught:
        tiny.sign(recipe(**tables(base=shared)))
    assert caught.value.subject == "licence of the releases"
    assert "CC-BY-NC-4.0" in (caught.value.expected or "")


@pytest.mark.parametrize("attack", ["as it is", "with its units in another order"])
def test_silo_that_returns_the_base_is_noticed_in_screening(
    first: Round, tmp_path: Path, attack: str
) -> None:
    plan = first.opened.plan.model_copy(update={"rehearsal": False})
    federation = first.tiny.federation
    examiner = Examiner(federation, plan)
    submission = first.opened.submissions["north"]
    assert isinstance(submission, Submission)
    (honest,) = submission.experts
    folder = federation.accepted_folder(plan, "north")
    figures = examiner.measure_expert("north", folder, honest, submission.digest)
    probe = examiner.probe("north")
    training = plan.expert.training
    flags = {fault.flag for fault in absolute_faults(figures, probe, training)}
    assert "unchanged" not in flags

    base_path = federation.plan_targets(plan.plan_id) / "plan/base.safetensors"
    weights = load_tensors(base_path, None, max_bytes=1 << 20)
    if attack != "as it is":
        # The same function by other weights: the hidden units of a block's network change places.
        order = torch.arange(64).flip(0)
        weights["blocks.0.up.weight"] = weights["blocks.0.up.weight"][order]
        weights["blocks.0.up.bias"] = weights["blocks.0.up.bias"][order]
        weights["blocks.0.down.weight"] = weights["blocks.0.down.weight"][:, order]
    lazy = lazy_expert(honest, tmp_path, weights)
    figures = examiner.measure_expert("north", tmp_path, lazy, submission.digest)
    faults = absolute_faults(figures, probe, training)
    assert "unchanged" in {fault.flag for fault in faults}
    assert any("the base that training started from" in str(fault) for fault in faults)


def lazy_expert(
    honest: SubmittedExpert, folder: Path, weights: dict[str, torch.Tensor]
) -> SubmittedExpert:
    path = folder / honest.file.path
    path.parent.mkdir(parents=True)
    save_tensors(path, weights)
    return honest.model_copy(update={"file": honest.file.of(honest.file.path, path)})


def write_student(
    first: Round,
    path: Path,
    manifest: str,
    learned: OwnSamples | GivenImages = OwnSamples(num=64, seed=0),
) -> None:
    """What `ddm distill` leaves, with north's weights and the digest of a release's manifest."""
    save_tensors(path, first.weights("north"))
    plan = first.opened.plan
    record = Student(
        source=StudentOrigin(
            plan_id=plan.plan_id, version=1, manifest=manifest, root=plan.root_digest
        ),
        images=learned,
        teacher="label",
        data=plan.data,
        architecture=plan.expert.architecture,
        path="linear",
        t_distribution=plan.t_distribution,
        training=plan.expert.training,
        loss=0.5,
        seconds=1.0,
        file=File.of(path.name, path),
    )
    path.with_suffix(".json").write_bytes(record.encode())


def test_student_is_a_base_where_all_of_its_teachers_agreed(first: Round, tmp_path: Path) -> None:
    path = tmp_path / "student.safetensors"
    write_student(first, path, "0" * 64)
    with pytest.raises(DigestError):
        student_source(first.opened, path, NOBODY)
    write_student(first, path, first.opened.manifest_digest)
    # East did not agree, and the student knows what east's expert knows.
    with pytest.raises(PolicyError) as caught:
        student_source(first.opened, path, NOBODY)
    assert "east" in (caught.value.got or "") and "north" not in (caught.value.got or "")
    submissions = {
        silo_id: submission.model_copy(update={"serve_as_base": True})
        for silo_id, submission in first.opened.submissions.items()
    }
    source = student_source(replace(first.opened, submissions=submissions), path, NOBODY)
    assert isinstance(source.origin, StudentBase)
    assert (source.origin.silos, source.num_images) == (("east", "north"), 64)
    assert not source.origin.trained_privately
    # By these, a plan of experts with other heads is refused.
    assert source.architecture == first.opened.plan.expert.architecture
    north = expert_source(first.opened, "north", NOBODY)
    assert north.architecture == first.opened.plan.expert.architecture


def test_student_learned_from_the_base_of_a_plan_whose_experts_are_all_carried_over(
    first: Round, second: Round
) -> None:
    """The base of the second round is north's expert; in this release north's own expert is not there any more."""
    earlier = first.opened.plan
    (carried_expert,) = [
        expert for expert in first.opened.manifest.experts if expert.silo_id == "east"
    ]
    carried = CarriedSilo(
        silo_id="east",
        plan_id=earlier.plan_id,
        plan_digest=earlier.digest,
        submission_digest=first.opened.submissions["east"].digest,
    )
    plan = second.opened.plan.model_copy(update={"silos": ("north",), "carried": (carried,)})
    release = replace(second.opened, plan=plan, earlier_plans={earlier.plan_id: earlier})
    assert teachers_of(release, [carried_expert]) == (("east",), False)
    assert teachers_of(release, [carried_expert], by_student=True) == (("east", "north"), False)
    assert "north" in silos_without_consent(release, [carried_expert], {"north"}, by_student=True)


def test_silo_that_left_is_known_by_way_of_a_student_of_a_round_without_own_experts(
    first: Round, second: Round, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a student starts from the base of its round, in which that base's silo takes no part."""
    tiny = first.tiny.copy(tmp_path / "tiny")
    earlier = first.opened.plan
    carried = CarriedSilo(
        silo_id="east",
        plan_id=earlier.plan_id,
        plan_digest=earlier.digest,
        submission_digest=first.opened.submissions["east"].digest,
    )
    # The second round starts from north's expert; west, which alone trains for it, never submits.
    round_two = second.opened.plan.model_copy(update={"silos": ("west",), "carried": (carried,)})
    student = StudentBase(
        root=tiny.federation.root_digest,
        plan_id=round_two.plan_id,
        version=1,
        manifest="0" * 64,
        silos=("east", "north"),
        digest="0" * 64,
        trained_privately=False,
        images="own_samples",
    )
    assert round_two.base is not None
    base = round_two.base.model_copy(update={"origin": student})
    round_three = round_two.model_copy(update={"plan_id": "digits-33333333", "base": base})
    signed = {plan.plan_id: plan for plan in (earlier, round_two)}
    monkeypatch.setattr(released_base, "read_signed_plan", lambda _, plan_id: signed[plan_id])
    release = replace(second.opened, plan=round_three, submissions={}, earlier_plans={})
    # The control.
    assert silos_that_left(tiny.federation, release) == NOBODY
    key = load_key(tiny.federation, "receipts", PASSPHRASE)
    withdraw_silo(tiny.federation, "north", "a test", key)
    assert silos_that_left(tiny.federation, release) == {"north"}


@pytest.mark.parametrize(
    ("learned", "is_private"),
    [(OwnSamples(num=64, seed=0), True), (GivenImages(num=64, digest="0" * 64), False)],
)
def test_student_of_private_experts_is_private_only_if_it_learned_their_own_samples(
    first: Round, tmp_path: Path, learned: OwnSamples | GivenImages, is_private: bool
) -> None:
    """The attack: a student learns a silo's images openly, and its base still counts as private."""
    path = tmp_path / "student.safetensors"
    write_student(first, path, first.opened.manifest_digest, learned)
    privacy = DpSgdPrivacy(epsilon=1.0, delta=1e-6, unit="image", noise_multiplier=2.0, rate=0.1)
    experts = [
        expert.model_copy(update={"privacy": privacy}) for expert in first.opened.manifest.experts
    ]
    private_release = replace(
        first.opened,
        manifest=first.opened.manifest.model_copy(update={"experts": tuple(experts)}),
        submissions={
            silo_id: submission.model_copy(update={"serve_as_base": True})
            for silo_id, submission in first.opened.submissions.items()
        },
    )
    source = student_source(private_release, path, NOBODY)
    assert isinstance(source.origin, StudentBase)
    assert source.origin.trained_privately == is_private
    assert source.origin.images == learned.kind
    assert first.opened.plan.base is not None
    base = first.opened.plan.base.model_copy(update={"origin": source.origin})
    assert ("images that its maker gave" in base.words) == (not is_private)
    assert base.exposed_silos == (() if is_private else ("east", "north"))
