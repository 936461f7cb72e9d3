"""Changes of several files: what a killed process left beside what it staged."""

from pathlib import Path

from ddm.io.changes import Change
from ddm.io.files import write_atomic


def test_parts_that_a_killed_process_left_are_not_moved_into_place(tmp_path: Path) -> None:
    change = Change.begin(tmp_path)
    write_atomic(change.put("plans/a/plan.json"), b"new")
    staged = change.put("plans/a")
    (staged / ".plan.json.123.part").write_bytes(b"ha")
    (staged / ".bundle.part").mkdir()
    (staged / ".bundle.part" / "timestamp.json").write_bytes(b"{}")
    change.commit()
    assert {path.name for path in (tmp_path / "plans" / "a").iterdir()} == {"plan.json"}
    assert not list(tmp_path.glob("ceremony*"))
