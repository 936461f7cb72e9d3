"""Classes by number and by name."""

import pytest
from pydantic import ValidationError

from ddm.protocol.architecture import ClassCondition
from ddm.protocol.classes import Classes
from tests.support.case import case

NAMED = Classes(3, ("normal", "Viral pneumonia", "2"))


def test_labels_mean_classes_by_name_or_by_number() -> None:
    for text, number in {
        " NORMAL": 0,
        "viral  pneumonia": 1,
        "2": 2,
        "1": 1,
        "1.0": 1,
        "viral": None,
        "3": None,
        "-1": None,
        "": None,
        "1.5": None,
        "9" * 5000: None,
    }.items():
        with case(text=text[:20]):
            assert NAMED.number(text) == number
    assert Classes(2).number("1") == 1 and Classes(2).number("normal") is None
    assert (NAMED.name(1), Classes(2).name(1)) == ("Viral pneumonia", "1")
    assert (NAMED.words(1), Classes(2).words()) == ("normal and 2 more", "0 to 1")
    assert Classes(2).choices() == "0 to 1"
    assert NAMED.choices() == "normal, Viral pneumonia, 2, or a number from 0 to 2"


@pytest.mark.parametrize(
    "names",
    [
        ("a",),
        ("a", "b", "c"),
        ("a", " a"),
        ("a", "A"),
        ("1", "0"),
        ("a", "0"),
        ("a", ""),
        ("a", "b\n"),
        ("a", "b" * 65),
    ],
)
def test_names_that_do_not_tell_classes_apart_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        ClassCondition(num_classes=2, names=names)


def test_names_of_classes_survive_encoding() -> None:
    named = ClassCondition(num_classes=2, names=("normal", "R\u00f6ntgen"))
    assert ClassCondition.model_validate_json(named.model_dump_json()) == named
