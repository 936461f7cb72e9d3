"""Islands that start from a seed: how the budget is divided, what the release states, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aggregator.config import Federation, FederationSettings
from aggregator.planning.recipe import Recipe
from aggregator.planning.released_base import verify_base_release
from aggregator.setup import init_federation
from ddm.errors import DigestError, PolicyError, SetupError
from ddm.io.locks import locked
from ddm.io.settings import load_settings
from ddm.io.tensors import load_tensors
from ddm.islands.folder import Islands
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.seed import divide_budget
from ddm.loading.release import Release, open_release
from ddm.models import expected_tensors, training_flops
from ddm.planning.recipe import ReleaseBaseRecipe
from ddm.planning.released_base import expert_source
from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import Dit
from ddm.protocol.bases import ExpertBase, SeedBase
from ddm.protocol.learning import Training
from ddm.protocol.plan import Plan
from ddm.training.schedule import learning_rate
from tests.support.case import case
from tests.support.federation import PASSPHRASE
from tests.support.forked import fork_process, wait_for_exit
from tests.support.islands import RECIPE, Owner, digits
from tests.support.publishing import kill_at_step, publish_short_pages

STEPS = 8
SEED_STEPS = 2
NUM_IMAGES = 600
BATCH = 8
RATE = 0.002


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """Two islands that start from a seed; nothing is trained."""
    owner = Owner.make(tmp_path_factory.mktemp("split"), steps=STEPS)
    result = owner.split("--islands", 2, "--seed-share", 0.25)
    assert result.code == 0, result.err
    assert "each island then makes 6 steps in place of 8" in result.out
    return owner


@pytest.fixture(scope="module")
def published(split: Owner, tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """The same, trained by one command and published."""
    owner = copy_of(split, tmp_path_factory.mktemp("published"))
    with pytest.MonkeyPatch.context() as patch:
        publish_short_pages(patch)
        for result in (owner.train(), owner.assemble("release")):
            assert result.code == 0, result.err
    return owner


def copy_of(owner: Owner, folder: Path) -> Owner:
    shutil.copytree(owner.path, folder / "owner")
    return Owner(folder / "owner")


def opened(owner: Owner) -> Release:
    return open_release(owner.path / "release", root=owner.root, state=None)


def change_record(path: Path, **changes: object) -> None:
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | changes))


@pytest.mark.parametrize(
    ("num_islands", "share", "batch_size"),
    [(8, 0.25, None), (8, 0.25, 32), (3, 0.5, 96), (1024, 0.1, None)],
)
def test_seed_and_islands_see_as_many_images_as_islands_without_a_seed(
    num_islands: int, share: float, batch_size: int | None
) -> None:
    whole = Training(
        num_steps=1000, batch_size=32, learning_rate=0.001, weight_decay=0.01, ema_width=0.1
    )
    budget = divide_budget(whole, share, num_islands, batch_size)
    images_by_seed = budget.seed.num_steps * budget.seed.batch_size
    images_by_islands = num_islands * budget.island.num_steps * budget.island.batch_size
    assert images_by_seed + images_by_islands == num_islands * 1000 * 32
    assert images_by_seed == share * num_islands * 1000 * 32
    # What the recipe gives is already the rate of a start from a base.
    assert (budget.seed.learning_rate, budget.island.learning_rate) == (0.002, 0.001)


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("warmup_steps", [None, 0, 100])
def test_short_seed_and_its_islands_reach_their_learning_rate(
    warmup_steps: int | None, batch_size: int | None
) -> None:
    """The fault: with the warm-up of all 1,000 steps, a seed of 50 steps had ended before it reached its rate."""
    chosen = TrainingRecipe(
        num_steps=1000, batch_size=32, learning_rate=0.001, warmup_steps=warmup_steps
    )
    whole = chosen.plain(Dit(patch=2, hidden=16, depth=1, heads=2))
    budget = divide_budget(whole, 0.05, 8, batch_size)
    for part in (budget.seed, budget.island):
        highest = max(learning_rate(part, step) for step in range(part.num_steps))
        assert highest > 0.9 * part.learning_rate
        # As in a run of its own length.
        expected = {
            None: min(100, part.num_steps // 20),
            0: 0,
            100: part.num_steps // 10,
        }
        assert part.warmup_steps == expected[warmup_steps]


def test_seed_whose_batches_do_not_divide_those_of_the_islands_is_refused(tmp_path: Path) -> None:
    table = '[base]\nkind = "seed"\nshare = 0.25\nbatch_size = 5\n'
    owner = Owner.make(tmp_path, steps=STEPS, extra=table)
    result = owner.split("--islands", 2)
    assert result.code == SetupError.exit_code
    assert "a divisor of 16" in result.err
    assert not owner.run.exists()


def test_plan_manifest_card_and_info_state_the_seed_with_its_images_and_operations(
    published: Owner,
) -> None:
    release = opened(published)
    plan = release.plan
    assert plan.base is not None and release.manifest.base == plan.base
    origin = plan.base.origin
    assert isinstance(origin, SeedBase)
    assert (origin.num_steps, origin.batch_size) == (SEED_STEPS, 2 * BATCH)
    assert plan.base.num_images == NUM_IMAGES
    assert plan.base.licence == plan.licence
    per_image = training_flops(plan.expert.architecture, plan.expert_shape, 1, plan.condition)
    assert origin.flops == pytest.approx(per_image * SEED_STEPS * 2 * BATCH, rel=1e-12)

    islands = Islands(published.run)
    flops_of_islands = sum(islands.trained(number).training.flops for number in range(2))
    assert origin.flops / (origin.flops + flops_of_islands) == pytest.approx(0.25, rel=1e-12)
    assert origin.share == 0.25
    weights = published.run / "plan" / "plan" / "base.safetensors"
    signed = release.verified.files["plan/base.safetensors"].path
    assert signed.read_bytes() == weights.read_bytes()

    info = published.read("info", "release")
    assert "a seed of the same owner" in info.out and "2 steps of 16 images" in info.out
    assert f"{origin.flops:.3g} FLOP; 600 images" in info.out


def test_seed_has_the_rate_of_the_recipe_and_islands_start_from_its_weights_at_half_of_it(
    published: Owner,
) -> None:
    islands = Islands(published.run)
    assert islands.seed_plan.expert.training.learning_rate == RATE
    assert islands.seed_plan.base is None
    plan = islands.plan
    assert plan.expert.training.learning_rate == RATE / 2
    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    seed = load_tensors(islands.seed.weights, specs, max_bytes=10**6, max_abs=1e6)
    for number in range(2):
        expert = load_tensors(islands.island(number).expert, specs, max_bytes=10**6, max_abs=1e6)
        moved = max(float((expert[name] - seed[name]).abs().max()) for name in seed)
        # AdamW moves a weight by little more than its rate in a step; other random weights differ by far more.
        assert 0 < moved < 2 * plan.expert.training.num_steps * RATE / 2


def test_base_of_a_later_plan_names_all_islands_whose_images_the_seed_learned(
    published: Owner,
) -> None:
    source = expert_source(opened(published), "island0", frozenset())
    assert isinstance(source.origin, ExpertBase)
    assert source.origin.silos == ("island0", "island1")
    assert not source.origin.trained_privately


def test_island_is_not_trained_before_the_seed_and_the_remedy_trains_it(
    split: Owner, tmp_path: Path
) -> None:
    owner = copy_of(split, tmp_path)
    refused = owner.train("--island", 1)
    assert refused.code == SetupError.exit_code
    assert f"ddm train {owner.run} --seed-only" in refused.err
    assert owner.assemble("release").code == SetupError.exit_code
    with locked(owner.run / "seed", "training"):
        for words in ((), ("--seed-only",)):
            busy = owner.train(*words)
            assert busy.code == 6 and "the seed" in busy.err
    assert owner.train("--seed-only").code == 0
    assert owner.train("--island", 1).code == 0
    assert [Islands(owner.run).island(number).is_trained for number in range(2)] == [False, True]


def test_seed_killed_again_and_again_ends_in_the_same_bytes(split: Owner, tmp_path: Path) -> None:
    """By kill -9 right before a change on disk, each step having a checkpoint."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = copy_of(split, tmp_path / "one")
    two = copy_of(split, tmp_path / "two")
    assert wait_for_exit(fork_process(lambda: two.train("--seed-only"))) == 0
    seed = Islands(one.run).seed
    for changes in (1, 6, 20):
        killed = kill_at_step(changes, lambda: one.train("--seed-only", "--checkpoint-s", 0))
        assert killed and not seed.is_trained
    assert seed.job.path.exists()
    # The rows of all islands, in the order of the islands.
    images, _ = digits()
    rows = [np.load(one.run / "islands" / str(number) / "rows.npy") for number in range(2)]
    assert np.array_equal(np.load(seed.images), images[np.concatenate(rows)])
    assert wait_for_exit(fork_process(lambda: one.train("--seed-only"))) == 0
    assert seed.weights.read_bytes() == Islands(two.run).seed.weights.read_bytes()
    assert not seed.job.path.exists() and not seed.images.exists()


def test_plan_that_is_signed_while_the_process_is_killed_is_signed_by_the_next(
    published: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_short_pages(monkeypatch)
    owner = copy_of(published, tmp_path)
    # As after training: nothing is signed yet.
    for name in ("tuf", "log", "releases"):
        shutil.rmtree(owner.run / name)
    shutil.rmtree(owner.path / "release")
    (owner.run / "plan" / "plan.json").unlink()
    for changes in (1, 4, 8, 12, 16):
        assert kill_at_step(changes, lambda: owner.assemble("release"))
    assert owner.assemble("release").code == 0
    assert opened(owner).plan.digest == opened(published).plan.digest


def test_other_seed_than_that_of_the_experts_or_of_the_signed_plan_is_refused(
    published: Owner, tmp_path: Path
) -> None:
    owner = copy_of(published, tmp_path)
    islands = Islands(owner.run)
    record = islands.seed.record
    good = record.read_bytes()
    # What the plan would state of the seed is part of what was signed.
    change_record(
        record,
        training=json.loads(good)["training"] | {"flops": 1.0},
        expert=json.loads(good)["expert"],
    )
    refused = owner.assemble("again")
    assert refused.code == DigestError.exit_code and "the signed plan" in refused.err
    record.write_bytes(good)

    expert_record = islands.island(0).record
    good_expert = expert_record.read_bytes()
    change_record(expert_record, base="0" * 64)
    refused = owner.assemble("again")
    assert refused.code == DigestError.exit_code and "one that started from" in refused.err
    change_record(expert_record, base=None)
    assert "random weights" in owner.assemble("again").err
    expert_record.write_bytes(good_expert)

    weights = bytearray(islands.seed.weights.read_bytes())
    weights[-1] ^= 1
    islands.seed.weights.unlink()
    islands.seed.weights.write_bytes(weights)
    expert_record.unlink()
    refused = owner.train("--island", 0)
    assert refused.code == DigestError.exit_code and "plan/plan/base.safetensors" in refused.err


def test_recipes_and_options_that_no_seed_fits_are_refused(tmp_path: Path) -> None:
    table = '[base]\nkind = "seed"\nshare = 0.25\n'
    adaptation = '[expert.adaptation]\nkind = "lora"\nrank = 2\nalpha = 2.0\n'
    faults = (
        ("", ("--seed-share", 0), "above 0 and below 1"),
        ("", ("--seed-share", 1), "above 0 and below 1"),
        ("", ("--seed-share", "nan"), "above 0 and below 1"),
        ("", ("--seed-share", 0.05), "must leave steps to both"),
        (table, ("--seed-share", 0.5), "leave the options out"),
        (adaptation, ("--seed-share", 0.5), "leave [expert.adaptation] out"),
    )
    for number, (extra, words, expected) in enumerate(faults):
        with case((extra, words)):
            owner = Owner.make(tmp_path / str(number), steps=STEPS, extra=extra)
            result = owner.split(*words)
            assert result.code == SetupError.exit_code, result.err
            assert expected in result.err
            assert not owner.run.exists()
    # The control: the table is what the option writes.
    owner = Owner.make(tmp_path / "table", steps=STEPS, extra=table)
    assert load_settings(IslandsRecipe, owner.path / "plan.toml").base is not None
    owner = Owner.make(tmp_path / "option", steps=STEPS)
    assert owner.split().code == 0
    refused = owner.train("--seed-only")
    assert refused.code == SetupError.exit_code and "with --seed-share" in refused.err


def test_federation_has_no_seed_in_its_recipe_or_its_plan(published: Owner, tmp_path: Path) -> None:
    federation = (
        '[base]\nkind = "seed"\nshare = 0.25\n'
        '[statistics]\nunit = "image"\nrelation = "replace_one"\ntotal = { epsilon = 8.0, delta = 0.0 }\n'
        "counts = { epsilon = 8.0, num_groups = 8 }\n"
        "[audit]\nrequired = false\nmin_holdout_units = 1\nmax_near_copy_rate = 1.0\nmax_mia_auc = 1.0\n"
        "[limits]\nexpert_bytes = 1000000\nstatistic_bytes = 1000000\ntrain_s = 10\ngpu_hours = 0.0\n"
    )
    owners = '[owner]\nname = "digits"\nnum_groups = 8\n'
    learned = 'kind = "learned"\nhidden = 16\ndepth = 1\nnum_steps = 40'
    recipe = tmp_path / "plan.toml"
    text = RECIPE.replace(owners, "").replace(learned, 'kind = "counts"').format(steps=STEPS)
    recipe.write_text(text + federation)
    with pytest.raises(SetupError, match="base.kind seed is for ddm split"):
        load_settings(Recipe, recipe)

    # A plan in which nothing else is that of one owner.
    document = json.loads(Islands(published.run).plan.encode())
    Plan.parse(json.dumps(document).encode(), subject="plan.json")
    document["statistics"]["relation"] = "replace_one"
    with pytest.raises(Exception, match="base.origin seed is for the islands of one owner"):
        Plan.parse(json.dumps(document).encode(), subject="plan.json")


def test_islands_start_from_an_expert_of_an_own_earlier_release(
    published: Owner, tmp_path: Path
) -> None:
    table = f'[base]\nkind = "release"\nrelease = "{published.path / "release"}"\n'
    chosen = f'root = "{published.root}"\nexpert = "island1"\n'
    owner = Owner.make(tmp_path / "next", steps=2, extra=table + chosen)
    result = owner.split("--by", "site")
    assert result.code == 0, result.err
    plan = Islands(owner.run).plan
    assert plan.base is not None and isinstance(plan.base.origin, ExpertBase)
    assert (plan.base.origin.expert_id, plan.base.origin.version) == ("island1", 1)
    assert plan.base.num_images == Islands(published.run).trained(1).num_images
    earlier = Islands(published.run).island(1).expert
    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    expected = load_tensors(earlier, specs, max_bytes=10**6, max_abs=1e6)
    start = load_tensors(Islands(owner.run).seed.weights, specs, max_bytes=10**6, max_abs=1e6)
    assert all(bool((start[name] == expected[name]).all()) for name in expected)

    strangers_root = Owner.make(tmp_path / "stranger", steps=2)
    assert strangers_root.split().code == 0
    faults = (
        ("", SetupError.exit_code, "needs root"),
        (chosen.replace("island1", "island7"), SetupError.exit_code, "island0, island1"),
        (chosen.replace(str(published.root), str(strangers_root.root)), None, "root"),
    )
    for number, (words, code, expected_words) in enumerate(faults):
        with case(words):
            refused = Owner.make(tmp_path / str(number), steps=2, extra=table + words).split()
            assert refused.code != 0 and code in (None, refused.code), refused.err
            assert expected_words in refused.err


def test_plan_of_a_federation_may_start_from_a_release_of_islands(
    published: Owner, tmp_path: Path
) -> None:
    """One owner trained all of its experts, so that nobody else has to agree."""
    federation = Federation(tmp_path / "fed")
    settings = FederationSettings(name="fed", host="127.0.0.1", port=9092, licence="CC-BY-4.0")
    init_federation(federation, settings, PASSPHRASE)
    chosen = ReleaseBaseRecipe(
        kind="release", release=str(published.path / "release"), root=str(published.root)
    )
    release = verify_base_release(federation, chosen)
    assert release.plan == Islands(published.run).plan


def test_islands_do_not_start_from_a_release_of_a_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silos agreed to a base for plans of their own federation."""
    table = '[base]\nkind = "release"\nrelease = "r"\nroot = "1.root.json"\nexpert = "north"\n'
    owner = Owner.make(tmp_path, steps=2, extra=table)
    release = SimpleNamespace(submissions={"north": "a submission"})
    monkeypatch.setattr("ddm.islands.released_base.open_release", lambda *_, **__: release)
    refused = owner.split()
    assert refused.code == PolicyError.exit_code
    assert "a release of islands" in refused.err
    assert not owner.run.exists()
