"""Columns are normalised in one way; missing is missing; look-alike patients are listed; parts mean what words say."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.column_names import part_of
from ddm.images.columns import captions_of, names_of, num_patients, numbered, text_column, texts_of
from ddm.images.patients import canonical, order_of, pseudonyms, similar
from tests.support.case import case
from tests.support.errors import has_subject

KEY = bytes(32)
Column = NDArray[np.generic]


def test_spellings_of_one_value_are_joined_to_the_most_frequent() -> None:
    column = text_column(
        np.array(["North", "north ", "south", "North", "NORTH", "north\u00a0"]), "site"
    )
    assert column.values == ("North", "North", "south", "North", "North", "North")
    assert (column.num_joined, column.num_missing) == (2, 0)
    # of equally frequent ones, the first
    assert text_column(np.array(["b", "B"]), "site").values == (
        "b",
        "b",
    )
    joined = {
        "letters of full width": ["\uff21", "a"],
        "composed and decomposed": ["K\u00e4se", "Ka\u0308se"],
        "several blanks": ["New  York", "new york"],
        "sharp s": ["Stra\u00dfe", "STRASSE"],
        "numbers of a float column": ["12.0", "12"],
        "bytes and case": [b"x".decode(), "X"],
    }
    for name, spellings in joined.items():
        with case(name):
            assert len(set(text_column(np.array(spellings), "site").values)) == 1
    apart = {
        "leading zeros": ["07", "7"],
        "punctuation": ["a-b", "ab"],
        "fractions": ["1.5", "15"],
        "digits": ["1", "10"],
    }
    for name, spellings in apart.items():
        with case(name):
            assert len(set(text_column(np.array(spellings), "site").values)) == 2


def test_missing_values_are_counted_in_columns_of_every_type() -> None:
    columns: dict[str, tuple[Column, int]] = {
        "text": (np.array(["a", "", " ", "NaN", "None", "N/A", "<NA>", "null", "a"]), 7),
        "bytes": (np.array([b"a", b"", b"NA"]), 2),
        "floating point": (np.array([0.0, np.nan, np.inf]), 2),
        "objects": (np.array(["a", None, float("nan"), 3, True], dtype=object), 2),
        "whole numbers": (np.array([0, 1, -1]), 0),
        "truth": (np.array([True, False]), 0),
    }
    for name, (column_N, num_missing) in columns.items():
        with case(name):
            column = text_column(column_N, "site")
            assert column.num_missing == num_missing
            if not num_missing:
                assert len(column.require_complete("site")) == len(column_N)
                continue
            with pytest.raises(DataError) as caught:
                column.require_complete("column site")
            expected = f"none for {num_missing} of {len(column_N)} images"
            assert (caught.value.subject, caught.value.got) == ("column site", expected)
    site_N = np.repeat(["", "a", "b"], [66, 67, 67])
    with pytest.raises(DataError, check=has_subject("site")):
        text_column(site_N, "site").require_complete("site")


def test_numbers_are_written_as_tables_write_them() -> None:
    assert texts_of(np.array([12.0, 1.5, -3.0]), "x") == ["12", "1.5", "-3"]
    assert texts_of(np.array([2**63], np.uint64), "x") == [str(2**63)]
    assert texts_of(np.array([True, False]), "x") == ["1", "0"]
    assert names_of(np.array(["007", "7 ", ""])) == ["007", "7", ""]
    assert (
        names_of(np.array(["Gef\u00e4\u00df".encode(), "Gef\u00e4\u00df".encode("latin-1")]))
        == ["Gef\u00e4\u00df"] * 2
    )
    for column_N in (
        np.zeros((2, 2)),
        np.array(["2020"], "datetime64[Y]"),
        np.array([1j]),
        np.array([[1], {}], object),
    ):
        with case(column_N.dtype), pytest.raises(DataError):
            texts_of(column_N, "x")


def test_patients_are_counted_by_what_tells_them_apart() -> None:
    spellings = np.array(["P-17", "p 17", "(P17)", "P17.0", "P017", "P18"])
    assert numbered(spellings).tolist() == [0, 0, 0, 0, 1, 2]
    assert numbered(spellings, "digits").tolist() == [0, 0, 0, 0, 0, 1]
    assert numbered(np.array([7.0, 8.0, 7.0, 1.5, 15.0])).tolist() == [0, 1, 0, 2, 3]
    assert numbered(np.array([7, 8, 7], np.uint8)).tolist() == [0, 1, 0]
    assert numbered(np.array(["7", 7, "07"], object)).tolist() == [0, 0, 1]
    assert num_patients(np.array([b"a", b"A", b"b"])) == 2
    columns: dict[str, Column] = {
        "text": np.array(["a", "NA"]),
        "numbers": np.array([1.0, np.nan]),
        "objects": np.array(["a", None], object),
    }
    for name, column_N in columns.items():
        with case(name), pytest.raises(DataError, check=has_subject("patients")):
            numbered(column_N)


def test_digits_alone_tell_patients_apart_where_the_site_says_so() -> None:
    for same in ("17", "0017", "Pat 17", "PAT-0017", "\uff11\uff17", "17.0", "p1_7"):
        with case(same):
            assert canonical(same, "digits") == "17"
            assert pseudonyms(same, KEY, "digits") == pseudonyms("17", KEY, "digits")
            assert order_of(same, KEY, "digits") == order_of("17", KEY, "digits")
    assert canonical("000", "digits") == "0"
    assert canonical("Doe, John", "digits") == canonical("doejohn")
    assert pseudonyms("17", KEY) != pseudonyms("0017", KEY)


def test_look_alike_patients_are_listed_in_groups() -> None:
    for patients in (
        ["00017", "0017", " 17 "],
        ["M\u00dcLLER", "MUELLER", "Muller"],
        ["A017", "a17"],
        ["Renée", "RENEE"],
    ):
        with case(patients):
            assert len({similar(patient) for patient in patients}) == 1
            assert len({canonical(patient) for patient in patients}) == len(patients)
    for spellings in (["MUELLER", "Mueller"], ["a17", "A-17"], ["Strauß", "STRAUSS"]):
        with case(spellings):
            assert len({canonical(spelling) for spelling in spellings}) == 1
    assert canonical("17", "digits") == canonical("0017", "digits")
    assert pseudonyms("NA", KEY) is None
    assert len({similar(patient) for patient in ("17", "18", "Muller", "Meier")}) == 4
    assert similar("Andersen 01") == similar("andersen1") != similar("andersen2")
    exact = {pseudonyms(name, KEY) for name in ("M\u00fcller", "MUELLER", "Muller")}
    assert len(exact) == 3 and len({both[1] for both in exact if both is not None}) == 1


def test_words_for_parts_mean_train_validation_or_test() -> None:
    words = {
        "train": ("train", "Training", " TRAIN ", "train_set", "Trainset", "training-data"),
        "validation": (
            "val",
            "valid",
            "Validation",
            "dev",
            "validation set",
            "val_split",
            "tuning",
        ),
        "test": (
            "test",
            "TESTING",
            "hold-out",
            "holdout",
            "held out",
            "Test set",
            "test_images",
            "eval",
            "evaluation",
        ),
    }
    for part, spellings in words.items():
        for spelling in spellings:
            with case(spelling):
                assert part_of(spelling) == part
    for word in ("fold 1", "Nord", "contest", "set", "latest", "a", "trainer", "value", "0"):
        with case(word):
            assert part_of(word) == word
    for nothing in (None, "", " ", "NA", "nan"):
        with case(nothing):
            assert part_of(nothing) is None


def test_captions_are_texts_with_single_blanks_and_never_quoted() -> None:
    assert captions_of(np.array(["a  b\n", "", "NA", "None"])) == ("a b", "", "", "")
    assert captions_of(np.array(["a", None], object)) == ("a", "")
    wrong: dict[str, tuple[Column, str]] = {
        "numbers": (np.array([1, 2]), "int64"),
        "blank": (np.array(["", "nan"]), "only blank ones"),
        "no UTF-8": (np.array([b"DOE\xff"]), "not valid UTF-8"),
        "half of a pair": (np.array(["DOE\ud800"]), "not valid UTF-8"),
        "long": (np.array(["D" * 4097]), "4097"),
    }
    for name, (column_N, got) in wrong.items():
        with case(name), pytest.raises(DataError) as caught:
            captions_of(column_N)
        assert got in str(caught.value) and "DOE" not in str(caught.value)


@pytest.mark.parametrize("read", [names_of, numbered, captions_of])
def test_errors_of_columns_quote_no_entry(read: Callable[[Column], object]) -> None:
    with pytest.raises(DataError) as caught:
        read(np.array(["DOE^JOHN", {"DOE": 1}], object))
    assert "DOE" not in f"{caught.value}{caught.value.remedy}"
