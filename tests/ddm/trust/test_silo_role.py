"""Attacks on the signature over a submission, as intake meets them before anything else is parsed."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tuf.api.metadata import DelegatedRole, Delegations, TargetFile, Targets

from ddm.errors import (
    ArchipelagoError,
    DocumentError,
    ExpiredError,
    FederationError,
    FormatError,
    ReplayError,
    RoleError,
    SignatureError,
    UnsafePathError,
)
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import METADATA_LIFE, sign_metadata
from ddm.trust.paths import delegated_paths, owner, silo_role
from ddm.trust.silo_role import MAX_SILO_METADATA_BYTES, sign_silo_metadata, verify_silo_metadata
from tests.support.case import case

PLAN = "digits-3f9a1c2e"
ROOT_DIGEST = "f" * 64
KEY = SigningKey.generate()
FILES = {
    f"{PLAN}/silos/north/submission.json": (10, "a" * 64),
    f"{PLAN}/silos/north/experts/north/expert.safetensors": (20, "b" * 64),
}


@pytest.fixture
def sealed(now) -> bytes:
    return sign_silo_metadata(
        PLAN, "north", FILES, KEY, root_digest=ROOT_DIGEST, version=1, now=now
    )


def check(data: bytes, now, plan_id: str = PLAN, silo_id: str = "north", key=KEY.public):
    return verify_silo_metadata(
        data, root_digest=ROOT_DIGEST, plan_id=plan_id, silo_id=silo_id, key=key, now=now
    )


def signed_listing(now, *paths: str, key: SigningKey = KEY) -> bytes:
    targets = {path: TargetFile(1, {"sha256": "a" * 64}, path) for path in paths}
    fields = {"root_digest": ROOT_DIGEST}
    signed = Targets(1, None, now + METADATA_LIFE, targets, unrecognized_fields=fields)
    return sign_metadata(signed, [key])


def test_submission_role_returns_what_was_signed(sealed, now):
    assert check(sealed, now) == FILES


def test_submission_role_refused_after_any_one_byte_changes(sealed, now):
    for offset in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[offset] ^= 0x20 if chr(sealed[offset]).isalpha() else 0x01
        with pytest.raises((DocumentError, SignatureError)):
            check(bytes(damaged), now)


def test_submission_signed_by_another_silos_key_is_refused(sealed, now):
    with pytest.raises(SignatureError):
        check(sealed, now, key=SigningKey.generate().public)


def test_submission_with_a_second_signature_is_refused(now):
    targets = Targets(
        1,
        None,
        now + METADATA_LIFE,
        {path: TargetFile(1, {"sha256": "a" * 64}, path) for path in FILES},
    )
    with pytest.raises(SignatureError):
        check(sign_metadata(targets, [KEY, SigningKey.generate()]), now)


def test_submission_signed_for_another_federation_or_for_none_is_refused(sealed, now):
    elsewhere = sign_silo_metadata(
        PLAN, "north", FILES, KEY, root_digest="0" * 64, version=1, now=now
    )
    files = {path: TargetFile(1, {"sha256": "a" * 64}, path) for path in FILES}
    nowhere = sign_metadata(Targets(1, None, now + METADATA_LIFE, files), [KEY])
    for name, data in {"another": elsewhere, "none": nowhere}.items():
        with case(federation=name), pytest.raises(FederationError):
            check(data, now)


def test_submission_for_another_plan_is_refused_as_a_replay(sealed, now):
    with pytest.raises(ReplayError):
        check(sealed, now, plan_id="digits-00000002")


def test_submission_of_another_silo_is_refused_even_under_the_same_key(sealed, now):
    with pytest.raises(RoleError):
        check(sealed, now, silo_id="east")


def test_submission_that_lists_a_path_of_another_role_is_refused(now):
    for path in [
        f"{PLAN}/silos/east/submission.json",
        f"{PLAN}/plan.json",
        f"{PLAN}/manifest.json",
        f"{PLAN}/silos/north",
        f"{PLAN}/silos/north/a/b/c/d",
        f"{PLAN}/silos/northeast/x",
    ]:
        with case(path=path):
            with pytest.raises(RoleError):
                check(signed_listing(now, f"{PLAN}/silos/north/submission.json", path), now)
            with pytest.raises(RoleError):
                sign_silo_metadata(
                    PLAN,
                    "north",
                    FILES | {path: (1, "a" * 64)},
                    KEY,
                    root_digest=ROOT_DIGEST,
                    version=1,
                    now=now,
                )


def test_submission_that_lists_an_unsafe_path_is_refused(now):
    for tail in ["../east/x", "..", ".hidden", "a\\b", "a//b", "", "a b", "caf\u00e9"]:
        with case(tail=tail), pytest.raises((UnsafePathError, DocumentError)):
            check(
                signed_listing(
                    now, f"{PLAN}/silos/north/submission.json", f"{PLAN}/silos/north/{tail}"
                ),
                now,
            )


def test_submission_that_lists_no_submission_is_refused(now):
    for paths in ((), (f"{PLAN}/silos/north/experts/north/expert.safetensors",)):
        with pytest.raises(DocumentError):
            check(signed_listing(now, *paths), now)


def test_submission_that_expired_is_refused(sealed, now, later):
    with pytest.raises(ExpiredError):
        check(sealed, later(5 * 365))


def test_submission_that_delegates_is_refused(now):
    key = KEY.public.tuf_key()
    role = DelegatedRole("other", [key.keyid], 1, True, ["*"])
    targets = Targets(
        1,
        None,
        now + METADATA_LIFE,
        {},
        Delegations({key.keyid: key}, {"other": role}),
        unrecognized_fields={"root_digest": ROOT_DIGEST},
    )
    with pytest.raises(RoleError):
        check(sign_metadata(targets, [KEY]), now)


def test_metadata_of_another_kind_is_refused_as_a_submission(now):
    data = json.loads(sign_metadata(Targets(1, None, now + METADATA_LIFE), [KEY]))
    data["signed"]["_type"] = "timestamp"
    for value in (data, [], {}, {"signed": {}, "signatures": []}):
        with pytest.raises(DocumentError):
            check(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), now)


def test_oversized_submission_role_is_refused_before_it_is_parsed(now):
    with pytest.raises(DocumentError):
        check(b"[" * (MAX_SILO_METADATA_BYTES + 1), now)


def test_signing_refuses_ids_that_are_none_and_a_time_without_zone(now):
    for plan_id, silo_id in (("digits", "north"), (PLAN, "North"), (PLAN, "../x"), (PLAN, "")):
        with pytest.raises(DocumentError):
            sign_silo_metadata(
                plan_id, silo_id, FILES, KEY, root_digest=ROOT_DIGEST, version=1, now=now
            )
    with pytest.raises(FormatError):
        sign_silo_metadata(
            PLAN,
            "north",
            FILES,
            KEY,
            root_digest=ROOT_DIGEST,
            version=1,
            now=now.replace(tzinfo=None),
        )


def values():
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=20)
        | st.just("a" * 64)
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_submission_role_raises_only_our_errors_on_any_fields(data, now, sealed):
    value = json.loads(sealed)
    place = data.draw(
        st.sampled_from(
            [value, value["signed"], value["signatures"][0], *value["signed"]["targets"].values()]
        )
    )
    place[data.draw(st.sampled_from([*place, "delegations", "extra"]))] = data.draw(values())
    changed = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    if changed != sealed:
        with pytest.raises(ArchipelagoError):
            check(changed, now)


@given(st.binary(max_size=300))
def test_submission_role_raises_only_our_errors_on_any_bytes(data):
    with pytest.raises(ArchipelagoError):
        check(data, datetime.now(UTC))


segments = st.sampled_from(
    [
        PLAN,
        "digits-00000002",
        "silos",
        "north",
        "east",
        "plan",
        "plan.json",
        "manifest.json",
        "model.sig",
        "class_counts",
        "a",
        "experts",
    ]
)


@given(st.lists(segments, min_size=1, max_size=7).map("/".join))
def test_owner_agrees_with_the_patterns_that_tuf_is_given(path):
    roles = ["plans", "release", silo_role(PLAN, "north"), silo_role(PLAN, "east")]
    matching = [
        role
        for role in roles
        if DelegatedRole(role, [], 1, True, delegated_paths(PLAN, role)).is_delegated_path(path)
    ]
    expected = owner(path, PLAN)
    assert matching == ([expected] if expected in roles else [])
