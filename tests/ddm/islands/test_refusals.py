"""What `ddm split`, `train` and `assemble` refuse, each on one screen that says what to do."""

import json
from pathlib import Path

import numpy as np
import pytest

import ddm.io.space
import ddm.islands.assemble
import ddm.islands.split
import ddm.publishing.signing
from aggregator.planning.recipe import Recipe
from ddm.errors import SetupError
from ddm.io.locks import locked
from ddm.io.settings import load_settings
from ddm.islands.data import Dataset
from ddm.islands.folder import Islands
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.split import split as divide
from ddm.protocol.manifest import Manifest
from silo.config import Policy
from silo.plan.policy import broken_rules
from tests.support.case import case
from tests.support.islands import RECIPE, Owner
from tests.support.publishing import publish_changed_manifest, publish_unchecked


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """Two islands, not trained."""
    owner = Owner.make(tmp_path_factory.mktemp("split"), steps=5)
    assert owner.split().code == 0
    return owner


def test_recipe_or_data_that_do_not_fit_are_refused_and_leave_no_folder(tmp_path: Path) -> None:
    faults = (
        ("dim = 12", "dim = 12\nwidth = 3", 3, "a field that does not exist"),
        ("shape = [1, 8, 8]", "shape = [1, 9, 9]", 7, "image shape"),
        ("range = [-1.0, 1.0]", "range = [0.0, 1.0]", 7, "within [0, 1]"),
        ("patch = 4", "patch = 3", 3, "patch"),
        ("min_images = 40", "min_images = 500", 7, "ask for fewer islands"),
        (
            "[router]",
            '[expert.adaptation]\nkind = "own"\nplan_id = "digits-0123abcd"\n[router]',
            3,
            "use full, lora or partial",
        ),
        ("num_coarse = 2", "num_coarse = 9", 3, "no more coarse clusters than groups"),
    )
    for number, (good, bad, code, words) in enumerate(faults):
        with case(bad):
            assert good in RECIPE
            owner = Owner.make(tmp_path / str(number), recipe=RECIPE.replace(good, bad))
            result = owner.split()
            assert result.code == code, result.err
            assert words.lower() in result.err.lower()
            assert "to do:" in result.err
            assert not owner.run.exists()
            assert [path.name for path in owner.path.iterdir() if "part" in path.name] == []


def test_commands_with_a_wrong_folder_number_or_passphrase_say_what_is_right(
    split: Owner, tmp_path: Path
) -> None:
    assert split.split().code == 6  # never overwritten
    assert "0 to 1" in split.train("--island", 2).err
    missing = Owner(tmp_path)
    assert (missing.train().code, missing.assemble("release").code) == (4, 4)
    assert "ddm split" in missing.train().err
    untrained = split.assemble("release")
    assert untrained.code == 3
    assert "none for 0, 1" in untrained.err
    assert split.split("--by", "hospital").code == 6
    column = Owner.make(tmp_path / "other").split("--by", "hospital")
    assert column.code == 7
    assert "a column called hospital" in column.err


def test_folder_of_another_version_is_named_as_such(split: Owner, tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.run.mkdir()
    other = json.loads((split.run / "split.json").read_bytes()) | {"format": "archipelago/split/9"}
    (owner.run / "split.json").write_text(json.dumps(other))
    result = owner.train()
    assert result.code == 3
    assert (
        "made by this version of ddm split" in result.err
        and "Use the version that made it" in result.err
    )


def test_two_processes_never_train_one_island(split: Owner) -> None:
    with locked(split.run / "islands" / "0", "training"):
        refused = split.train("--island", 0)
        assert refused.code == 6
        assert "island 0" in refused.err and "no other process" in refused.err
        others = split.train()
        assert others.code == 0, others.err
        assert "island 0 is being trained by another process" in others.err
        assert "1 of 2 islands are trained" in others.out
    assert [Islands(split.run).island(number).is_trained for number in range(2)] == [False, True]


def test_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner.make(tmp_path)
    monkeypatch.setattr(ddm.io.space, "free_bytes", lambda folder: 1000)
    result = owner.split()
    assert result.code == 9
    assert "the islands' images" in result.err
    assert not owner.run.exists()


def test_ctrl_c_while_dividing_leaves_nothing(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    recipe = load_settings(IslandsRecipe, owner.path / "plan.toml")

    def interrupt(num_done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        divide(
            Dataset.read(owner.path / "data.npz", recipe.data),
            recipe,
            2,
            "clusters",
            owner.run,
            b"x",
            interrupt,
        )
    assert not owner.run.exists()
    assert not list(owner.path.glob(".run*"))


def test_silo_refuses_an_owners_plan_and_a_federation_its_statistics(split: Owner) -> None:
    plan = Islands(split.run).plan
    broken = {
        rule[0]: rule[2]
        for rule in broken_rules(plan, Policy(), silo_id="island0", now=plan.created_at)
    }
    assert "one owner" in broken["relation of the statistics"]
    recipe = split.path / "federation.toml"
    federation = (
        '[statistics]\nunit = "image"\nrelation = "RELATION"\ntotal = { epsilon = 1000.0, delta = 0.0 }\n'
        "counts = { epsilon = 1000.0, num_groups = 8 }\n"
        "[audit]\nrequired = false\nmin_holdout_units = 1\nmax_near_copy_rate = 1.0\nmax_mia_auc = 1.0\n"
        "[limits]\nexpert_bytes = 1000000\nstatistic_bytes = 1000000\ntrain_s = 10\ngpu_hours = 0.0\n"
    )
    without = RECIPE.replace('[owner]\nname = "digits"\nnum_groups = 8\n', "").format(steps=5)
    without = without.replace(
        'kind = "learned"\nhidden = 16\ndepth = 1\nnum_steps = 40', 'kind = "counts"'
    )
    recipe.write_text(without + federation.replace("RELATION", "none"))
    with pytest.raises(SetupError, match="replace_one"):
        load_settings(Recipe, recipe)
    recipe.write_text(without + federation.replace("RELATION", "replace_one"))
    assert load_settings(Recipe, recipe)  # the control
    assert load_settings(IslandsRecipe, recipe).not_used == ("statistics", "audit", "limits")


def test_wrong_passphrase_publishes_nothing_and_a_release_that_claims_privacy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is signed by the owner's own keys: the readers' checks refuse it."""
    owner = Owner.make(tmp_path, steps=5)
    assert (owner.split().code, owner.train().code) == (0, 0)
    (owner.path / "other").write_text("another passphrase\n")
    assert owner.assemble("release", "--passphrase-file", owner.path / "other").code == 5
    assert not (owner.path / "release").exists()
    assert not list((owner.run / "releases").glob("*"))

    def lie(manifest: Manifest) -> Manifest:
        claims = {"epsilon": 1.0, "delta": 0.0}
        silos = tuple(silo.model_copy(update=claims) for silo in manifest.silos)
        return manifest.model_copy(update={"silos": silos})

    publish_changed_manifest(monkeypatch, lie)
    publish_unchecked(monkeypatch)
    assert owner.assemble("release").code == 0
    refused = owner.read("verify", "release")
    assert refused.code == 10
    assert "epsilon" in refused.err


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path, extra='[condition]\nkind = "class"\nnum_classes = 5\n')
    result = owner.split()
    assert result.code == 7
    assert "0 to 4" in result.err and "others at" in result.err
    images = np.load(owner.path / "data.npz")["images"]
    np.savez(owner.path / "data.npz", images=images, labels=np.zeros(3, np.int64))
    assert "one value an image" in owner.split().err
