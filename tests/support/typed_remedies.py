"""Write `typed_remedies.json`, from which docs/reference/remedies.md is made: python -m tests.support.typed_remedies.

It makes every mistake and every state, does what each remedy says, and takes some minutes.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.support.mistakes import TypedRemedy, WaitingFederation, type_remedy
from tests.support.remedy_states import REMEDY_STATES
from tests.test_mistakes import MISTAKES
from tools.reference.remedies import TYPED_REMEDIES


def recorded_remedies() -> dict[str, TypedRemedy]:
    """Return what is recorded, by the state."""
    records = json.loads(TYPED_REMEDIES.read_text("utf-8"))
    return {record["state"]: TypedRemedy(**record) for record in records}


def record_remedies() -> None:
    """Type every remedy, and record how it ended."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        world = WaitingFederation.create(Path(folder) / "Süd 1")
        for number, (state, mistake) in enumerate((MISTAKES | REMEDY_STATES).items()):
            typed_remedy = type_remedy(state, mistake, world.copy(Path(folder) / f"copy {number}"))
            if typed_remedy is not None:
                records.append(asdict(typed_remedy))
    text = json.dumps(records, indent=1, ensure_ascii=False)
    TYPED_REMEDIES.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    record_remedies()
