"""Fingerprints: equal for equal contents under one key and purpose alone."""

import numpy as np

from ddm.images.picture import DecodedPicture, Picture
from ddm.images.record import fingerprint, record_of

KEY = bytes(range(32))


def test_fingerprints_tell_contents_purposes_and_keys_apart_and_not_how_they_were_cut() -> None:
    content = np.random.default_rng(0).bytes(100_000)
    whole = fingerprint(b"content", [content], KEY)
    assert len(whole) == 32 and whole == fingerprint(b"content", [content[:7], content[7:]], KEY)
    others = {fingerprint(b"pixels", [content], KEY), fingerprint(b"content", [content], bytes(32))}
    for place in (0, 5000, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        others.add(fingerprint(b"content", [bytes(changed)], KEY))
    others.add(fingerprint(b"content", [content + b"\0"], KEY))
    assert len(others | {whole}) == 7


def test_pixels_of_another_shape_or_type_are_other_pixels() -> None:
    values = np.arange(64, dtype=np.uint8)
    shapes = (
        values.reshape(1, 8, 8),
        values.reshape(1, 4, 16),
        values.view(np.uint16).reshape(1, 4, 8),
    )
    actual = [record_of(DecodedPicture.of(Picture(shape)), KEY).pixels for shape in shapes]
    assert len(set(actual)) == 3
    assert (
        actual[0]
        == record_of(
            DecodedPicture.of(Picture(values.reshape(1, 8, 8).copy()), patient="x", kind="PNG"), KEY
        ).pixels
    )
