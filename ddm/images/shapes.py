"""The shapes in which a stored row may hold an image of a plan."""

from ddm.protocol.data import DataSpec


def row_shapes(spec: DataSpec) -> tuple[tuple[int, ...], ...]:
    """Return them: as it is, flat, or without the axis of the only channel."""
    flat = (spec.dim,)
    if spec.shape[0] == 1 and len(spec.shape) < 4:
        return (spec.shape, spec.shape[1:], flat)
    return (spec.shape, flat)
