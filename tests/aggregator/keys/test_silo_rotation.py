"""What a release says of its silos' changes of keys."""

import json

from aggregator.keys.silo_rotation import collect_key_history
from ddm.protocol.enrolment import MAX_KEY_HISTORY_BYTES, MAX_ROTATIONS, KeyHistory
from tests.support.federation_keys import KeyedFederation

# As long as a rotation may be; what stands in it is for readers to check.
ROTATIONS = tuple(
    f'{{"format":"archipelago/envelope/1","number":"{number:03d}","x":"{"y" * 4000}"}}'
    for number in range(MAX_ROTATIONS)
)


def keep(keyed: KeyedFederation, silo_id: str, rotations: tuple[str, ...]) -> None:
    card = (keyed.federation.registry / f"{silo_id}.json").read_text("utf-8")
    path = keyed.federation.registry / "rotations" / f"{silo_id}.json"
    path.parent.mkdir(exist_ok=True)
    document = {"format": "archipelago/rotated-card/1", "card": card, "rotations": rotations}
    path.write_text(json.dumps(document), "utf-8")


def test_history_is_whole_where_readers_take_it(keyed: KeyedFederation) -> None:
    assert collect_key_history(keyed.federation, ["east", "north"]) is None
    keep(keyed, "east", ROTATIONS)
    keep(keyed, "north", ROTATIONS[:3])
    assert collect_key_history(keyed.federation, ["east", "north"]) == KeyHistory(
        silos={"east": ROTATIONS, "north": ROTATIONS[:3]}
    )


def test_history_that_is_too_long_for_readers_loses_what_is_longest_ago(
    keyed: KeyedFederation,
) -> None:
    silos = [f"silo{number:02d}" for number in range(40)]
    for silo_id in ("east", "north"):
        keep(keyed, silo_id, ROTATIONS)
    many = keyed.federation.registry / "rotations"
    for silo_id in silos:
        (many / f"{silo_id}.json").write_bytes((many / "east.json").read_bytes())
    keep(keyed, "north", ROTATIONS[:2])
    history = collect_key_history(keyed.federation, [*silos, "north"])
    assert history is not None
    assert history.silos["north"] == ROTATIONS[:2]
    num = len(history.silos["silo00"])
    assert all(history.silos[silo_id] == ROTATIONS[-num:] for silo_id in silos)
    assert len(history.encode()) <= MAX_KEY_HISTORY_BYTES
    one_more = KeyHistory(silos=history.silos | dict.fromkeys(silos, ROTATIONS[-num - 1 :]))
    assert len(one_more.encode()) > MAX_KEY_HISTORY_BYTES
