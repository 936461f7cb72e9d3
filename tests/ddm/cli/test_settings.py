"""Rare settings: `--set NAME=VALUE` is read strictly, and says which names and values there are."""

import pytest

from ddm.cli.settings import SampleSettings, read_settings
from ddm.errors import SetupError
from tests.support.errors import has_subject


def test_settings_are_read_by_name_and_keep_their_defaults() -> None:
    assert read_settings(SampleSettings, None) == read_settings(SampleSettings, [])
    words = ["mass=0.5", "least=0", "router-every=3", "class-prior=east=1,north=2", "batch=16"]
    assert read_settings(SampleSettings, words).model_dump() == {
        "mass": 0.5,
        "least": 0.0,
        "router_every": 3,
        "class_prior": "east=1,north=2",
        "batch": 16,
        "guidance_interval": None,
        "corrections": None,
    }


@pytest.mark.parametrize("word", ["batches=1", "mass", "", "=1", "router_every=3", "MASS=0.5"])
def test_name_that_does_not_exist_is_refused_with_those_that_do(word: str) -> None:
    with pytest.raises(SetupError) as refused:
        read_settings(SampleSettings, [word])
    assert refused.value.subject == "--set"
    assert all(
        name in str(refused.value.expected)
        for name in ("mass", "least", "router-every", "class-prior", "batch")
    )
    assert repr(word) in str(refused.value.got)


@pytest.mark.parametrize(
    "word",
    [
        "mass=0",
        "mass=1.1",
        "mass=nan",
        "mass=",
        "least=-1",
        "router-every=0",
        "router-every=1.5",
        "batch=many",
    ],
)
def test_value_out_of_range_is_refused_with_the_range(word: str) -> None:
    name, _, value = word.partition("=")
    with pytest.raises(SetupError) as refused:
        read_settings(SampleSettings, [word])
    assert refused.value.subject == f"--set {name}"
    assert refused.value.expected == SampleSettings.names()[name]
    assert refused.value.got == repr(value)


def test_name_that_comes_twice_is_refused_with_both_values() -> None:
    with pytest.raises(SetupError, check=has_subject("--set batch")):
        read_settings(SampleSettings, ["batch=1", "batch=2"])
