"""What intake refuses, one test an attack, on a real submission that it otherwise accepts."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aggregator.registry import card_of, signing_key
from ddm.errors import (
    AbsentFileError,
    ArchipelagoError,
    DigestError,
    LedgerError,
    PolicyError,
    ReplayError,
    RoleError,
    SignatureError,
    TensorFileError,
    UnlistedFileError,
    UnsafePathError,
)
from ddm.protocol.base import now_utc, sha256_file, sha256_hex
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.silo_role import sign_silo_metadata
from tests.federation import TinyFederation

SILO = "north"


@dataclass
class Arrival:
    """A submission that has arrived and may be tampered with before intake sees it."""

    tiny: TinyFederation
    plan_id: str
    folder: Path
    key: SigningKey

    @property
    def document_path(self) -> Path:
        return self.folder / "silos" / SILO / "submission.json"

    @property
    def expert_path(self) -> Path:
        return self.folder / "silos" / SILO / "experts" / SILO / "expert.safetensors"

    @property
    def role_path(self) -> Path:
        return self.folder / "metadata" / f"{self.plan_id}.{SILO}.json"

    def document(self) -> dict:
        return json.loads(self.document_path.read_bytes())

    def rewrite(self, change: Callable[[dict], None], *, key: SigningKey | None = None, version: int = 1) -> None:
        """Change the document, describe the files as they now are, and sign it all again as a cheating silo would."""
        document = self.document()
        expert, releases = document["experts"][0], document["releases"]
        for entry, path in [(expert, self.expert_path), *((r, self.folder / r["file"]["path"]) for r in releases)]:
            entry["file"] |= {"bytes": path.stat().st_size, "digest": sha256_file(path)}
        change(document)
        encoded = json.dumps(document).encode()
        self.document_path.write_bytes(encoded)
        prefix = f"{self.plan_id}/"
        signed = {f"{prefix}silos/{SILO}/submission.json": (len(encoded), sha256_hex(encoded))}
        signed[prefix + expert["file"]["path"]] = (expert["file"]["bytes"], expert["file"]["digest"])
        role = sign_silo_metadata(self.plan_id, SILO, signed, key or self.key, version=version, now=now_utc())
        self.role_path.write_bytes(role)

    def verdict(self) -> Receipt:
        receipts = [receipt for receipt in self.tiny.take_in() if receipt.silo_id == SILO]
        assert len(receipts) == 1
        return receipts[0]

    def refused(self, error: type[ArchipelagoError], *words: str) -> None:
        """Intake refuses with exactly this error, and keeps nothing."""
        verdict = self.verdict().verdict
        assert verdict.kind == "refused"
        assert verdict.code == error.exit_code, verdict.reason
        assert all(word in verdict.reason for word in words), verdict.reason
        assert not (self.tiny.federation.accepted / self.plan_id / SILO).exists()


@pytest.fixture(scope="module")
def sent_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFederation, str]:
    """A federation whose silo has a submission in its outbox; nothing was taken in."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("intake"), {"north": 40, "south": 30})
    plan_id = tiny.sign()
    tiny.deliver_plan(SILO, plan_id)
    tiny.work(SILO)
    return tiny, plan_id


@pytest.fixture
def arrival(sent_once: tuple[TinyFederation, str], tmp_path: Path) -> Arrival:
    original, plan_id = sent_once
    folder = tmp_path / "copy"
    shutil.copytree(original.path, folder)
    sites = {silo_id: type(site)(folder / silo_id) for silo_id, site in original.sites.items()}
    tiny = TinyFederation(folder, type(original.federation)(folder / "fed"), sites)
    return Arrival(tiny, plan_id, tiny.collect(SILO, plan_id), tiny.key(SILO))


def test_intake_accepts_what_the_silo_sent_and_signs_a_receipt_that_binds_it(arrival: Arrival) -> None:
    receipt = arrival.verdict()
    assert receipt.verdict.kind == "accepted"
    assert receipt.submission_digest == sha256_file(arrival.document_path)
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


def test_intake_refuses_a_submission_signed_by_another_silos_key(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: None, key=arrival.tiny.key("south"))
    arrival.refused(SignatureError)


def test_intake_refuses_a_submission_for_another_plan(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(plan_id="tiny-00000000"))
    arrival.refused(ReplayError, "plan")


def test_intake_refuses_a_submission_for_another_version_of_the_plan(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(plan_digest="0" * 64))
    arrival.refused(ReplayError, "plan digest")


def test_intake_refuses_a_submission_that_names_another_silo(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(silo_id="south"))
    arrival.refused(ReplayError, "silo")


def test_intake_refuses_a_replayed_submission(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["releases"][0].update(epsilon=2.0))
    arrival.refused(PolicyError)
    shutil.copytree(arrival.tiny.sites[SILO].outbox / arrival.plan_id / "1", arrival.folder.with_name("2"))
    receipts = arrival.tiny.take_in()
    assert [receipt.verdict.kind for receipt in receipts] == ["refused"]
    assert receipts[0].verdict.code == ReplayError.exit_code  # type: ignore[union-attr]


def test_intake_refuses_anything_after_an_accepted_submission(arrival: Arrival) -> None:
    assert arrival.verdict().verdict.kind == "accepted"
    shutil.copytree(arrival.folder, arrival.folder.with_name("2"))
    receipts = arrival.tiny.take_in()
    assert [getattr(receipt.verdict, "code", None) for receipt in receipts] == [ReplayError.exit_code]


def test_intake_refuses_a_role_that_lists_another_silos_files(arrival: Arrival) -> None:
    role = json.loads(arrival.role_path.read_bytes())
    name = next(iter(role["signed"]["targets"]))
    role["signed"]["targets"][name.replace(SILO, "south")] = role["signed"]["targets"].pop(name)
    arrival.role_path.write_text(json.dumps(role))
    verdict = arrival.verdict().verdict
    assert verdict.kind == "refused"
    assert verdict.code in {RoleError.exit_code, SignatureError.exit_code, 21}


@pytest.mark.parametrize("name", ["document_path", "expert_path", "role_path"])
def test_intake_refuses_a_flipped_byte(arrival: Arrival, name: str) -> None:
    path: Path = getattr(arrival, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert arrival.verdict().verdict.kind == "refused"


def test_intake_refuses_a_flipped_byte_in_a_release(arrival: Arrival) -> None:
    path = arrival.folder / "sketch.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arrival.refused(DigestError, "sketch.safetensors")


@pytest.mark.parametrize("name", ["counts.safetensors", "metadata", "silos/north/experts/north/expert.safetensors"])
def test_intake_refuses_a_missing_file(arrival: Arrival, name: str) -> None:
    path = arrival.folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    arrival.refused(AbsentFileError)


def test_intake_refuses_a_file_that_nobody_listed(arrival: Arrival) -> None:
    (arrival.folder / "extra.bin").write_bytes(b"hello")
    arrival.refused(UnlistedFileError)


def test_intake_refuses_a_symbolic_link(arrival: Arrival) -> None:
    path = arrival.folder / "counts.safetensors"
    path.unlink()
    path.symlink_to("/etc/passwd")
    arrival.refused(UnsafePathError)


def test_intake_refuses_a_pickle_in_place_of_weights(arrival: Arrival) -> None:
    arrival.expert_path.write_bytes(pickle.dumps({"weights": [1.0]}))
    arrival.rewrite(lambda document: None)
    arrival.refused(TensorFileError)


def test_intake_refuses_misshaped_weights(arrival: Arrival) -> None:
    weights = load_file(arrival.expert_path)
    name = max(weights, key=lambda key: weights[key].numel())
    save_file(weights | {name: weights[name].T.contiguous()[:1]}, arrival.expert_path)
    arrival.rewrite(lambda document: None)
    arrival.refused(TensorFileError)


def test_intake_refuses_weights_with_a_nan(arrival: Arrival) -> None:
    weights = load_file(arrival.expert_path)
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, arrival.expert_path)
    arrival.rewrite(lambda document: None)
    arrival.refused(TensorFileError)


def test_intake_refuses_sketches_for_more_units_than_stated(arrival: Arrival) -> None:
    path = arrival.folder / "sketch.safetensors"
    sketch = load_file(path)["sketch"]
    save_file({"sketch": torch.cat([sketch, sketch])}, path)
    arrival.rewrite(lambda document: None)
    arrival.refused(TensorFileError)


def test_intake_refuses_a_submission_that_spent_more_than_the_plan(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["spent"].update(epsilon=9.0))
    arrival.refused(PolicyError, "epsilon")


def test_intake_refuses_sketches_released_below_the_plans_noise_level(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document["releases"][1].update(t_release=0.1))
    arrival.refused(PolicyError, "t_release")


def test_intake_refuses_a_submission_that_nobody_approved(arrival: Arrival) -> None:
    arrival.rewrite(lambda document: document.update(approval=None))
    arrival.refused(PolicyError, "approval")


def test_intake_refuses_a_ledger_that_does_not_extend_the_one_seen(arrival: Arrival) -> None:
    seen = arrival.tiny.federation.registry / "ledgers" / f"{SILO}.json"
    seen.parent.mkdir()
    seen.write_text(json.dumps({"chain": ["f" * 64]}))
    arrival.refused(LedgerError)


def test_intake_answers_a_submission_too_large_to_fetch(arrival: Arrival) -> None:
    shutil.rmtree(arrival.folder)
    arrival.folder.with_name("1.toolarge").touch()
    arrival.refused(PolicyError, "size")


def test_enrolled_key_is_the_one_that_signed(arrival: Arrival) -> None:
    assert signing_key(card_of(arrival.tiny.federation, SILO)) == arrival.key.public
