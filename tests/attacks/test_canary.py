"""A patient's name, number and birth date, wherever an export has room for them: no byte of them leaves the silo.

The search knows many forms, packed ones too (`tests/support/canary.py`), and is shown to find each of them first.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

from aggregator.config import Federation
from ddm.protocol.base import sha256_file
from ddm.system.processes import free_port
from silo.config import Site
from tests.support.canary import TEXTS, find_texts, find_texts_below, forms, pack_every_way
from tests.support.canary_files import export_table, export_tree, pixels
from tests.support.case import case
from tests.support.federation import POLICY, TinyFederation, recipe, waive, write_policy
from tests.support.operators import Operators
from tests.support.tap import Tap

NUM = 44
EXPORTS = {"north": export_table, "south": export_tree}
PATIENTS = POLICY | {"privacy": {"unit": "patient"}}
TRANSFORM = {"channels": "grey", "storage": "uint8"}


def asked() -> dict[str, object]:
    """The tables of a recipe whose unit is the patient, so that a silo has to read whose each picture is."""
    statistics = recipe().statistics.model_dump(mode="json", exclude_none=True) | {
        "unit": "patient"
    }
    return {"transform": TRANSFORM, "statistics": statistics}


def test_search_finds_each_text_in_each_form_and_nothing_in_noise(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(2_000)
    assert not find_texts(noise)
    for text in TEXTS:
        for form, written in forms(text).items():
            with case(text=text, form=form):
                assert {hit for hit, _ in find_texts(noise + written + noise)} == {text}
        for at in range(3):
            lines = forms(text)[f"base64 of utf-8 at {at}"]
            assert find_texts(lines[:5] + b"\r\n" + lines[5:])
    for kind, content in pack_every_way(" and ".join(TEXTS).encode(), tmp_path).items():
        with case(kind=kind):
            assert {text for text, _ in find_texts(content)} == set(TEXTS)
    (tmp_path / "outbox" / TEXTS[0]).mkdir(parents=True)
    (tmp_path / "outbox" / "expert").write_bytes(noise + forms(TEXTS[2])["hex of utf-16-le"])
    assert len(find_texts_below(tmp_path / "outbox")) == 2


def test_nothing_that_leaves_a_worker_says_whose_the_pictures_are(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    for silo_id, export in EXPORTS.items():
        data = export(tmp_path / f"export of {silo_id}", NUM, len(tiny.sites))
        tiny.join_with(silo_id, data, PATIENTS)
    plan_id = tiny.sign(recipe(**asked()))
    for silo_id, site in tiny.sites.items():
        tiny.deliver_plan(silo_id, plan_id)
        assert tiny.work(silo_id).state == "in_outbox"
        tiny.collect(silo_id, plan_id)
        submission = json.loads(next(site.outbox.rglob("submission.json")).read_bytes())
        assert submission["num_units"] == NUM // 2, "patients were told apart"
        assert len(np.load(next(site.private.glob("unpacked-*.npy")))) == NUM, (
            "of every kind, but none that waits"
        )
        assert find_texts_below(tmp_path / f"export of {silo_id}"), "there is something to find"
    assert {receipt.verdict.kind for receipt in tiny.take_in()} == {"accepted"}
    assert not find_texts_below(*leaving(tiny.path, tiny.sites))
    outbox = tiny.sites["north"].outbox
    (outbox / "note").write_bytes(forms(TEXTS[0])["base64 of latin-1 at 1"])
    assert find_texts_below(outbox), "the search would have seen it there"


def leaving(folder: Path, sites: dict[str, Site]) -> list[Path]:
    """Everything of a federation's folders that somebody but a silo's worker sees or may be sent."""
    parts = [part for site in sites.values() for part in (site.outbox, site.inbox, site.courier)]
    cards = [folder / f"{silo_id}.card.json" for silo_id in sites]
    return [folder / "fed", *cards, *parts]


@pytest.mark.slow
def test_nothing_of_a_patient_crosses_the_network_or_reaches_aggregator_and_readers(
    tmp_path: Path,
) -> None:
    operators = Operators(tmp_path)
    set_up(operators)
    fed = operators.fed
    sites = {silo_id: Site(tmp_path / silo_id) for silo_id in EXPORTS}
    settings = fed / "federation.toml"
    announced_port = json.loads((fed / "invitation.json").read_text())["address"].rpartition(":")[2]
    port = free_port()
    settings.write_text(settings.read_text().replace(f"port = {announced_port}", f"port = {port}"))
    with Tap(int(announced_port), port, fed / "tls") as tap:
        try:
            operators.serve("aggregator", "aggregator", "run", fed)
            for silo_id in EXPORTS:
                operators.serve(silo_id, "silo", "run", tmp_path / silo_id)
            operators.wait_until(
                lambda: all(operators.ended_well(name) for name in operators.services), "the end"
            )
        finally:
            operators.stop()
    assert not any(operators.num_restarts.values())
    operators.call("aggregator", "router", fed)
    operators.call("aggregator", "publish", fed, "--rehearsal", "--out", tmp_path / "release")
    root = fed / "tuf" / "metadata" / "1.root.json"
    assert "none unlisted" in operators.call("ddm", "verify", tmp_path / "release", "--root", root)
    said = tmp_path / "said"
    said.mkdir()
    for silo_id in EXPORTS:
        (said / silo_id).write_text(operators.call("silo", "status", tmp_path / silo_id))
    expert = next(sites["north"].outbox.rglob("expert.safetensors")).read_bytes()
    passed = [bytes(stream) for stream in tap.streams]
    assert any(expert[:2000] in stream for stream in passed), "the tap reads what silos send"
    assert sum(map(len, passed)) > len(expert) * len(sites)
    for stream in passed:
        assert not find_texts(stream)
    places = [*leaving(tmp_path, sites), tmp_path / "release", tmp_path / "logs", said]
    assert all(place.exists() for place in places)
    assert any(path.name == "superlink.db" for path in fed.rglob("*"))
    assert not find_texts_below(*places)


def set_up(operators: Operators) -> None:
    """Make a federation of two hospitals with a plan, through the commands alone."""
    folder = operators.folder
    (folder / "pass").write_text("correct horse\n")
    secret = ("--passphrase-file", folder / "pass")
    address = f"127.0.0.1:{free_port()}"
    operators.call(
        "aggregator",
        "init",
        operators.fed,
        "--name",
        "two",
        "--licence",
        "CC-BY-4.0",
        "--address",
        address,
        *secret,
    )
    invitation_digest = sha256_file(operators.fed / "invitation.json")
    for seed, (silo_id, export) in enumerate(EXPORTS.items()):
        data = export(folder / f"export of {silo_id}", NUM, seed)
        operators.call("silo", "init", folder / silo_id, "--id", silo_id, "--data", data,
                       "--invitation", operators.fed / "invitation.json", "--code", invitation_digest,
                       *secret)  # fmt: skip
        write_policy(Site(folder / silo_id), PATIENTS)
        card = folder / f"{silo_id}.card.json"
        operators.call("silo", "enroll", folder / silo_id, "--out", card)
        operators.call("aggregator", "enroll", "--yes", operators.fed, card)
    public = folder / "public"
    public.mkdir()
    for number in range(240):
        Image.fromarray(pixels(1000 + number)).save(public / f"{number:03}.png")
    tables = recipe(**asked()).model_dump(mode="json", exclude_none=True)
    (folder / "plan.toml").write_bytes(tomli_w.dumps(tables).encode())
    operators.call(
        "aggregator",
        "plan",
        operators.fed,
        "--recipe",
        folder / "plan.toml",
        "--public",
        public,
        "--yes",
    )
    for silo_id in EXPORTS:
        waive(Site(folder / silo_id), Federation(operators.fed).current_plan()[1])
