"""Parts of a data set by the names that people give them."""

from ddm.images.column_names import part_of
from tests.support.case import case


def test_usual_names_of_parts_mean_train_validation_or_test() -> None:
    names = {
        "train": ("train", "Training", " TRAIN ", "trn"),
        "validation": ("val", "valid", "Validation", "dev"),
        "test": ("test", "TEST", "Hold-out", "hold_out", "testing"),
    }
    for part, spellings in names.items():
        for name in spellings:
            with case(name):
                assert part_of(name) == part


def test_other_names_stay_and_blank_ones_are_none() -> None:
    assert part_of(" fold 3 ") == "fold 3"
    assert part_of(None) is None and part_of("  ") is None
