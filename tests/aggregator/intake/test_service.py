"""What intake refuses, one test an attack, on a real submission that it otherwise accepts.

What the silo did not sign is thrown away unanswered, so that nobody uses up the silo's submissions in its name.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tuf.api.metadata import TargetFile, Targets

from aggregator.intake import service as taking_in
from aggregator.intake.own_files import FederationFilesError
from aggregator.membership.registry import card_of, signing_key
from aggregator.transfer.receipts_folder import is_plan_finished
from ddm.errors import (
    DocumentError,
    LedgerError,
    PolicyError,
    ReplayError,
    SetupError,
    TensorFileError,
)
from ddm.privacy.bounds import cell_noise_bound
from ddm.protocol.base import now_utc, sha256_file
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.transport.messages import MAX_SUBMISSIONS
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey
from ddm.trust.metadata import METADATA_LIFE, sign_metadata
from tests.support.submissions import SILO, Arrival

pytestmark = pytest.mark.usefixtures("short_pages")


def test_intake_accepts_what_the_silo_sent_and_signs_a_receipt_that_binds_it(
    arrival: Arrival,
) -> None:
    digest = sha256_file(arrival.document_path)
    receipt = arrival.verdict()
    assert receipt.verdict.kind == "accepted"
    assert receipt.submission_digest == digest
    plan, plan_digest = arrival.tiny.federation.current_plan()
    sealed = (arrival.tiny.federation.receipts / arrival.plan_id / SILO / "1.json").read_bytes()
    payload, _ = open_sealed(sealed, RECEIPT_KIND, PublicKey.parse(plan.receipt_key), 65536)
    assert Receipt.parse(payload, subject="receipt") == receipt
    assert (receipt.plan_id, receipt.plan_digest, receipt.silo_id, receipt.sequence) == (
        plan.plan_id,
        plan_digest,
        SILO,
        1,
    )


def test_intake_accepts_a_document_signed_again_by_its_own_silo(arrival: Arrival) -> None:
    """The control: the refusals below are due to what they change, not to signing again."""
    arrival.rewrite(lambda document: None)
    assert arrival.verdict().verdict.kind == "accepted"


def test_intake_throws_away_a_submission_signed_by_another_silos_key(
    arrival: Arrival, caplog: pytest.LogCaptureFixture
) -> None:
    arrival.rewrite(lambda document: None, key=arrival.tiny.key("south"))
    arrival.assert_discarded()
    assert "[north] submission 1 is not what the silo signed" in caplog.text
    arrival.arrive_again(1)
    assert arrival.verdict().verdict.kind == "accepted", "the silo's own follows"
    assert not (arrival.receipts / "1.unsigned").exists()


def test_intake_refuses_a_submission_for_another_plan(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(plan_id="tiny-00000000"))
    arrival.assert_refused(ReplayError, "plan")


def test_intake_refuses_a_submission_for_another_version_of_the_plan(arrival: Arrival) -> None:
    def other(document: dict) -> None:
        document["plan_digest"] = document["audit"]["waiver"]["plan_digest"] = "0" * 64

    arrival.rewrite(other)
    arrival.assert_refused(ReplayError, "plan digest")


def test_intake_refuses_a_submission_that_names_another_silo(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(silo_id="south"))
    arrival.assert_refused(ReplayError, "silo")


def test_intake_refuses_a_replayed_submission(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["statistics"][0].update(epsilon=2.0))
    arrival.assert_refused(PolicyError)
    replayed = arrival.arrive_again(2)
    assert arrival.tiny.take_in() == []
    assert not replayed.exists()
    assert {path.name for path in arrival.receipts.iterdir()} == {"1.json", "2.unsigned"}


def test_intake_answers_nothing_after_an_accepted_submission(arrival: Arrival) -> None:
    """A receipt there would stand where a notice of withdrawal has to."""
    assert arrival.verdict().verdict.kind == "accepted"
    late = arrival.arrive_again(2)
    assert arrival.tiny.take_in() == []
    assert not late.exists()
    assert {path.name for path in arrival.receipts.iterdir()} == {"1.json", "final"}


@pytest.mark.parametrize("sequence", [2, MAX_SUBMISSIONS, MAX_SUBMISSIONS + 1, 999_999])
def test_submission_out_of_order_ends_nothing_for_the_silo(arrival: Arrival, sequence: int) -> None:
    forged = arrival.folder.with_name(f"{sequence}")
    shutil.copytree(arrival.folder, forged)
    assert arrival.verdict().verdict.kind == "accepted"
    assert not forged.exists()
    assert {path.name for path in arrival.receipts.iterdir()} == {"1.json", "final"}


def test_rubbish_in_a_silos_name_is_never_answered_however_often_it_comes(arrival: Arrival) -> None:
    for times in range(1, MAX_SUBMISSIONS + 3):
        shutil.rmtree(arrival.folder, ignore_errors=True)
        arrival.folder.mkdir()
        (arrival.folder / "rubbish").write_bytes(os.urandom(100))
        arrival.assert_discarded(times=times)
    arrival.arrive_again(1)
    assert arrival.verdict().verdict.kind == "accepted"


def own_file(arrival: Arrival, name: str) -> Path:
    """Return a file of the federation, whose name may contain those of the plan and the submission."""
    plan = arrival.plan_id
    digest = sha256_file(arrival.document_path)
    return arrival.tiny.federation.path / name.format(plan=plan, digest=digest, silo=SILO)


def wait_for_repair(arrival: Arrival) -> None:
    """Intake finds a damaged file of the federation, answers nobody, counts no attempt and keeps what arrived."""
    with pytest.raises(FederationFilesError):
        arrival.tiny.take_in()
    assert not (arrival.receipts / "1.json").exists() and (arrival.folder / "metadata").is_dir()
    assert not list((arrival.tiny.federation.attempts / arrival.plan_id).rglob("[0-9]*"))


@pytest.mark.parametrize("damage", [b"no such document = ", b"PK\x03\x04" + bytes(100), b""])
@pytest.mark.parametrize(
    "name",
    [
        "registry/notes.json",
        "federation.toml",
        "registry/ledgers/{silo}.json",
        "plans/{plan}/public.npz",
        "keys/screening.secret",
        "screening/{plan}/{digest}/{silo}.json",
        "screening/{plan}/{digest}.flags.json",
    ],
)
def test_nobody_is_answered_for_a_damaged_file_of_the_federation(
    arrival: Arrival, name: str, damage: bytes
) -> None:
    """What arrives meanwhile waits, rubbish is not refused in the silo's name, and no attempt is counted."""
    path = own_file(arrival, name)
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damage)
    wait_for_repair(arrival)
    path.unlink() if before is None else path.write_bytes(before)
    assert arrival.verdict().verdict.kind == "accepted"


def test_nobody_is_answered_for_a_flipped_byte_in_the_public_images(arrival: Arrival) -> None:
    path = own_file(arrival, "plans/{plan}/public.npz")
    before = path.read_bytes()
    flipped = bytearray(before)
    flipped[len(flipped) // 2] ^= 1
    path.write_bytes(flipped)
    wait_for_repair(arrival)
    path.write_bytes(before)
    assert arrival.verdict().verdict.kind == "accepted"


def test_intake_throws_away_a_role_that_lists_another_silos_files(arrival: Arrival) -> None:
    """The attack: north, with its own key and in good form, speaks for south."""
    listed = json.loads(arrival.role_path.read_bytes())["signed"]["targets"]
    for own in listed:
        names = {name.replace(SILO, "south") if name == own else name for name in listed}
        targets = {name: TargetFile(1, {"sha256": "a" * 64}, name) for name in names}
        role = Targets(1, None, now_utc() + METADATA_LIFE, targets)
        arrival.role_path.write_bytes(sign_metadata(role, [arrival.key]))
        arrival.assert_discarded()
        shutil.rmtree(arrival.receipts)
        arrival.arrive_again(1)


@pytest.mark.parametrize("name", ["document_path", "expert_path", "role_path"])
def test_intake_throws_away_a_flipped_byte(arrival: Arrival, name: str) -> None:
    path: Path = getattr(arrival, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    arrival.assert_discarded()


def test_intake_throws_away_a_flipped_byte_in_a_release(arrival: Arrival) -> None:
    path = arrival.folder / "sketch.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arrival.assert_discarded()


@pytest.mark.parametrize(
    "name", ["counts.safetensors", "metadata", "silos/north/experts/north/expert.safetensors"]
)
def test_intake_throws_away_what_lacks_a_file(arrival: Arrival, name: str) -> None:
    path = arrival.folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    arrival.assert_discarded()


def test_intake_throws_away_what_has_a_file_that_nobody_listed(arrival: Arrival) -> None:
    (arrival.folder / "extra.bin").write_bytes(b"hello")
    arrival.assert_discarded()


def test_intake_throws_away_what_has_a_symbolic_link(arrival: Arrival) -> None:
    path = arrival.folder / "counts.safetensors"
    path.unlink()
    path.symlink_to("/etc/passwd")
    arrival.assert_discarded()


def test_intake_refuses_a_pickle_in_place_of_weights(arrival: Arrival) -> None:
    arrival.expert_path.write_bytes(pickle.dumps({"weights": [1.0]}))
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(TensorFileError)


def test_intake_refuses_misshaped_weights(arrival: Arrival) -> None:
    weights = load_file(arrival.expert_path)
    name = max(weights, key=lambda key: weights[key].numel())
    save_file(weights | {name: weights[name].T.contiguous()[:1]}, arrival.expert_path)
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(TensorFileError)


def test_intake_refuses_weights_with_a_nan(arrival: Arrival) -> None:
    weights = load_file(arrival.expert_path)
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, arrival.expert_path)
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(TensorFileError)


def test_intake_refuses_sketches_for_more_units_than_stated(arrival: Arrival) -> None:
    path = arrival.folder / "sketch.safetensors"
    sketch = load_file(path)["sketch"]
    save_file({"sketch": torch.cat([sketch, sketch])}, path)
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(TensorFileError)


def test_intake_refuses_a_submission_that_spent_more_than_the_plan(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["spent"].update(epsilon=9.0))
    arrival.assert_refused(PolicyError, "epsilon")


def test_intake_refuses_a_submission_that_nobody_approved(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(approval=None))
    arrival.assert_refused(PolicyError, "approval")


def test_intake_refuses_a_ledger_that_does_not_extend_the_one_seen(arrival: Arrival) -> None:
    seen = arrival.tiny.federation.registry / "ledgers" / f"{SILO}.json"
    seen.parent.mkdir()
    seen.write_text(json.dumps({"chain": ["f" * 64]}))
    arrival.assert_refused(LedgerError)


def test_intake_refuses_a_document_of_another_form_that_the_silo_signed(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(unknown=1))
    arrival.assert_refused(DocumentError)


@pytest.mark.parametrize(
    "attack", ["the smallest integer", "below the noise", "above the noise", "units from nowhere"]
)
def test_intake_refuses_counts_that_no_noise_explains(arrival: Arrival, attack: str) -> None:
    plan, _ = arrival.tiny.federation.current_plan()
    reach = cell_noise_bound(plan.statistics.counts.epsilon, plan.statistics.counts.num_groups)
    num_units = arrival.document()["num_units"]
    counts = {
        "the smallest integer": [-(2**63), 0, num_units, 0],
        "below the noise": [-reach - 1, reach + 1, num_units, 0],
        "above the noise": [num_units + reach + 1, -reach // 2, -reach // 2, 0],
        "units from nowhere": [num_units + reach] * 4,
    }
    arrival.change_counts(lambda _: torch.tensor(counts[attack]))
    arrival.assert_refused(
        TensorFileError, "sum" if attack == "units from nowhere" else "counts within"
    )


def test_intake_accepts_counts_as_far_out_as_noise_may_carry_them(arrival: Arrival) -> None:
    plan, _ = arrival.tiny.federation.current_plan()
    reach = cell_noise_bound(plan.statistics.counts.epsilon, plan.statistics.counts.num_groups)
    arrival.change_counts(
        lambda _: torch.tensor([-reach, arrival.document()["num_units"] + reach, 0, 0])
    )
    assert arrival.verdict().verdict.kind == "accepted"


def test_intake_refuses_a_sketch_longer_than_noise_can_make_it(arrival: Arrival) -> None:
    path = arrival.folder / "sketch.safetensors"
    sketch = load_file(path)["sketch"]
    sketch[3] *= 100 / sketch[3].norm()
    save_file({"sketch": sketch}, path)
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(TensorFileError, "norm")


def test_accepted_bytes_stay_when_the_serverapp_keeps_a_hand_on_what_it_fetched(
    arrival: Arrival, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    os.link(arrival.expert_path, held)
    name = arrival.expert_path.relative_to(arrival.folder)
    before = arrival.expert_path.read_bytes()
    assert arrival.verdict().verdict.kind == "accepted"
    held.write_bytes(b"other weights")
    assert (arrival.accepted / name).read_bytes() == before


def test_what_was_answered_takes_no_room_any_more(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(approval=None))
    arrival.assert_refused(PolicyError)
    assert not arrival.folder.exists()
    assert (arrival.receipts / "1.json").exists()
    shutil.copytree(arrival.tiny.sites[SILO].outbox / arrival.plan_id / "1", arrival.folder)
    assert arrival.tiny.take_in() == [], "a crash before it was thrown away: no second answer"
    assert not arrival.folder.exists()


def test_plan_ends_when_intake_was_killed_between_the_receipt_and_its_mark(
    arrival: Arrival,
) -> None:
    assert arrival.verdict().verdict.kind == "accepted"
    (arrival.receipts / "final").unlink()
    assert arrival.tiny.take_in() == []
    (arrival.receipts / "1.delivered").touch()
    assert is_plan_finished(arrival.tiny.federation.path, arrival.plan_id, [SILO])


def test_refusal_is_not_the_end_when_intake_starts_again(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(approval=None))
    arrival.assert_refused(PolicyError)
    assert arrival.tiny.take_in() == []
    assert not (arrival.receipts / "final").exists()


def test_last_refusal_that_there_may_be_says_so_and_ends(
    arrival: Arrival, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_in, "MAX_SUBMISSIONS", 1)
    arrival.rewrite(lambda document: document.update(approval=None))
    arrival.assert_refused(PolicyError, "approval", "the last of 1 submissions")
    (arrival.receipts / "1.delivered").touch()
    assert is_plan_finished(arrival.tiny.federation.path, arrival.plan_id, [SILO])


def test_next_plan_is_refused_while_an_accepted_submission_is_in_no_release(
    arrival: Arrival, tmp_path: Path
) -> None:
    assert arrival.verdict().verdict.kind == "accepted"
    with pytest.raises(SetupError, match="north") as refused:
        arrival.tiny.sign()
    assert "aggregator release" in refused.value.remedy
    arrival.tiny.publish(tmp_path / "out")
    assert arrival.tiny.sign() != arrival.plan_id


def test_enrolled_key_is_the_one_that_signed(arrival: Arrival) -> None:
    assert signing_key(card_of(arrival.tiny.federation, SILO)) == arrival.key.public


def test_intake_refuses_a_release_that_the_plan_did_not_ask_for(arrival: Arrival) -> None:
    counts = torch.zeros(2, 4, dtype=torch.int64)
    save_file({"counts": counts}, arrival.folder / "class_counts.safetensors")
    file = {"path": "class_counts.safetensors", "bytes": 1, "digest": "a" * 64}
    extra = {"kind": "class_counts", "epsilon": 1.0, "delta": 0.0, "file": file}
    document = arrival.document()
    arrival.document_path.write_text(
        json.dumps(document | {"statistics": [*document["statistics"], extra]})
    )
    arrival.rewrite(lambda document: None)
    arrival.assert_refused(PolicyError, "statistics", "class_counts")


def test_intake_refuses_another_number_of_images_than_the_silos_units(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["experts"][0].update(num_images=39))
    arrival.assert_refused(PolicyError, "images of an expert")


def test_intake_refuses_a_silo_of_fewer_images_than_the_plan_asks(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(num_units=9))
    arrival.assert_refused(PolicyError, "images", "at least 10")
