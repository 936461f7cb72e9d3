"""The plan's transform as a document: what it leaves as it is, what it bounds, and what it says in words."""

import json
import tomllib

import pytest
from pydantic import ValidationError

from ddm.errors import DocumentError
from ddm.protocol.data import DataSpec
from ddm.protocol.growth import differences
from ddm.protocol.plan import Plan
from ddm.protocol.transform import PercentilesRange, TransformSpec
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject

GREY = DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0))


def parsed(**changes: object) -> Plan:
    return Plan.parse(to_bytes(plan_document(**changes)), subject="plan.json")


def spec(toml: str) -> TransformSpec:
    return TransformSpec.model_validate_json(json.dumps(tomllib.loads(toml)))


def test_transform_survives_encoding_and_is_part_of_the_digest() -> None:
    plan = Plan.parse(to_bytes(plan_document()), subject="plan.json")
    assert plan.transform is None
    with_table = parsed(transform={"fit": {"kind": "pad"}})
    assert Plan.parse(with_table.encode(), subject="plan.json") == with_table
    assert with_table.digest != plan.digest


def test_defaults_are_the_steps_of_plans_without_the_table() -> None:
    plain = TransformSpec()
    assert (plain.channels, plain.range, plain.fit.kind) == (
        "keep",
        PercentilesRange(low=0.5, high=99.5),
        "crop",
    )
    assert plain.content is None and plain.slices is None


def test_numbers_out_of_bounds_are_refused() -> None:
    for toml in (
        "range = {kind = 'values', low = 1.0, high = 1.0}",
        "range = {kind = 'values', low = -1e10, high = 0.0}",
        "range = {kind = 'values', low = 0.0}",
        "range = {kind = 'percentiles', low = 60.0, high = 40.0}",
        "range = {kind = 'percentiles', high = 100.1}",
        "range = {kind = 'window', fallback = 'guess'}",
        "range = {kind = 'loud'}",
        "content = {threshold = 1.0}",
        "content = {margin = 1.5}",
        "slices = {}",
        "slices = {count = 0}",
        "slices = {count = 4097}",
        "slices = {count = 1, share = [0.5, 0.5]}",
        "slices = {count = 1, share = [0.5, 1.1]}",
        "slices = {count = 1, axis = 'oblique'}",
        "fit = {kind = 'spacing'}",
        "fit = {kind = 'spacing', mm = 0.0}",
        "fit = {kind = 'crop', mm = 1.0}",
        "channels = 'pick'",
        "channels = 'grey'\npick = [0]",
        "channels = 'pick'\npick = [65536]",
        "padding = nan",
        "storage = 'float64'",
        "flip = true",
    ):
        with case(toml=toml), pytest.raises(ValidationError):
            spec(toml)


def test_a_transform_that_does_not_fit_shape_range_or_unit_is_refused_in_the_plan() -> None:
    volumes = DataSpec(shape=(1, 8, 8, 8), range=(-1.0, 1.0))
    for toml, data, words in (
        ("channels = 'rgb'", GREY, "3 channels"),
        ("channels = 'pick'\npick = [0, 1]", GREY, "2 channels"),
        ("channels = 'grey'", DataSpec(shape=(3, 8, 8), range=(-1.0, 1.0)), "1 channels"),
        ("slices = {count = 3}", volumes, "images"),
        ("padding = 1.5", GREY, "padding"),
        ("storage = 'float16'", DataSpec(shape=(1, 8, 8), range=(-1e5, 1e5)), "float16"),
    ):
        with case(toml=toml):
            assert words in (spec(toml).misfit(data) or "")
    assert spec("slices = {count = 3}").misfit(GREY) is None
    with pytest.raises(DocumentError, check=has_subject("plan.json, field document")) as caught:
        parsed(transform={"padding": 3.0})
    assert "padding within data.range" in (caught.value.got or "")
    with pytest.raises(DocumentError) as caught:
        parsed(transform={"slices": {"count": 3}})  # images are the units
    assert "patient" in (caught.value.got or "")
    statistics = plan_document()["statistics"] | {"unit": "patient"}
    assert parsed(transform={"slices": {"count": 3}}, statistics=statistics).transform is not None


def test_an_expert_goes_on_only_under_the_same_transform() -> None:
    with_table = {"fit": {"kind": "pad"}}
    for before, now in (
        (None, with_table),
        (with_table, None),
        (with_table, {"fit": {"kind": "crop"}}),
    ):
        old, new = (
            parsed(**({"transform": transform} if transform else {})) for transform in (before, now)
        )
        with case(before=before, now=now):
            assert any(
                name.startswith("transform") for name, _, _ in differences(old, new, "north")
            )
    assert not differences(parsed(transform=with_table), parsed(transform=with_table), "north")


def test_words_name_every_step_and_nothing_that_is_not_done() -> None:
    assert spec("").words == (
        "range from percentile 0.5 to 99.5",
        "resampled in proportion until no side is too short, the middle kept",
        "kept as uint16",
    )
    every = spec(
        """
        channels = "grey"
        range = {kind = "values", low = -160.0, high = 240.0}
        content = {threshold = 0.1, margin = 0.05}
        slices = {axis = "coronal", count = 9, share = [0.25, 0.75]}
        fit = {kind = "spacing", mm = 1.5}
        padding = -1.0
        storage = "uint8"
        """
    ).words
    said = "; ".join(every)
    for part in (
        "luminance",
        "-160 to 240",
        "0.1",
        "margin of 5%",
        "9 coronal",
        "25% to 75%",
        "1.5 mm",
        "-1",
        "uint8",
    ):
        assert part in said
