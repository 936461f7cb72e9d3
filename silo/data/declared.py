"""Compares a site's data with what policy.toml declares about them; what a plan says plays no part.

Headers and columns are checked whenever the data are opened, values by `silo scan` and when they are read.
"""

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays, open_images
from ddm.images.columns import class_numbers, read_column
from ddm.images.find import DataKind
from ddm.images.rows import blocks
from ddm.protocol.classes import Classes, find_naming_fault
from ddm.protocol.data import DataSpec
from silo.config import DataPolicy, Policy
from silo.data.problems import refuse_all
from silo.images.scan import ScannedImages
from silo.images.source import ImageSource

_REMEDY = "Correct the data, or what [data] in policy.toml declares about them; plans are compared with that alone."


def facts_of(source: ImageSource) -> DataPolicy:
    """Return what can be declared of data by their headers; ranges, classes and captions are the site's to say."""
    data = source.find()
    if data.arrays is None:
        return DataPolicy(kind=data.kind.value)
    dtype, shape = data.arrays.row
    value_range = None
    if data.kind is DataKind.ARRAYS and dtype.kind == "f":
        # Floating point in another range than this usual one is noticed when the values are read.
        value_range = (-1.0, 1.0)
    return DataPolicy(kind=data.kind.value, shape=shape, range=value_range)


def check_declared(source: ImageSource, policy: Policy) -> None:
    """Check kind, shape, type, number and classes of arrays against the declaration, by headers and columns.

    Raises:
        DataError: everything that does not fit.
    """
    declared = policy.data
    data = source.find()
    # Latents must be declared: anybody who reads them as images would see noise.
    if data.kind != declared.kind and (declared.kind or data.kind is DataKind.LATENTS):
        expected = f"{declared.kind or 'a kind'}, as policy.toml declares (data.kind)"
        raise DataError("data", expected=expected, got=data.kind.value, remedy=_REMEDY)
    classes = declared.known_classes
    if classes is not None and classes.names:
        problem = find_naming_fault(classes.names, classes.num)
        if problem:
            raise DataError(
                "classes in policy.toml (data.classes)",
                expected="names of which each means one class, as in a plan",
                got=problem,
                remedy=_REMEDY,
            )
    if declared.kind is None or data.arrays is None:
        return
    arrays = source.arrays(data)
    problems = [
        *_header_problems(arrays, declared),
        *_number_problems(len(arrays), policy),
        *_label_problems(arrays, classes),
    ]
    refuse_all(problems, _REMEDY)


def check_values(source: ImageSource, policy: Policy) -> int:
    """Check every value of arrays, or number and classes of pictures, against the declaration; return the number.

    Raises:
        DataError: what does not fit.
    """
    check_declared(source, policy)
    data = source.find()
    if data.arrays is None or policy.data.kind is None:
        return _check_pictures(source, policy)
    arrays = source.arrays(data)
    if data.kind is DataKind.ARRAYS and policy.data.range and policy.data.shape:
        shape = _with_three_axes(policy.data.shape)
        spec = DataSpec(shape=shape, range=policy.data.range)
        for _ in blocks(open_images(arrays, spec, source.folder.parent)):
            pass  # reading a block checks its values
    return len(arrays)


def _check_pictures(source: ImageSource, policy: Policy) -> int:
    with ScannedImages.opened(source) as images:
        # Files that failed before are not tried again, so that card, declaration and training count the same
        # pictures.
        images.update(retry=False)
        labels = [image.label for image in images if image.reason is None]
    problems = _number_problems(len(labels), policy)
    classes = policy.data.known_classes
    if classes is not None:
        num_unknown = sum(classes.number(label or "") is None for label in labels)
        if num_unknown:
            got = f"others, or none, at {num_unknown} of {len(labels)} images"
            problems.append(
                DataError("labels", expected=f"{classes.words()} (data.classes)", got=got)
            )
    refuse_all(problems, _REMEDY)
    return len(labels)


def _with_three_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    missing = max(0, 3 - len(shape))
    # A row (H, W) is an image of one channel, and a plan writes its shape as (C, H, W).
    return (1,) * missing + shape


def _header_problems(arrays: ImageArrays, declared: DataPolicy) -> list[DataError]:
    dtype, shape = arrays.row
    problems = []
    if shape != declared.shape:
        problems.append(
            DataError("shape of a row", expected=f"{declared.shape} (data.shape)", got=f"{shape}")
        )
    # The type of whole numbers fixes their range; of floating point only the site can say it.
    if arrays.name == "images" and (dtype.kind == "f") != (declared.range is not None):
        if declared.range is not None:
            expected = "floating point, since policy.toml has data.range"
        else:
            expected = "whole numbers: policy.toml has no data.range"
        problems.append(DataError("values", expected=expected, got=str(dtype)))
    if declared.captions and "captions" not in arrays.columns:
        expected = "a text for each image (data.captions)"
        problems.append(DataError("captions", expected=expected, got="no such column"))
    return problems


def _number_problems(num: int, policy: Policy) -> list[DataError]:
    if num >= policy.min_images:
        return []
    expected = f"at least {policy.min_images} (data.min_images, else training.min_images)"
    remedy = "Add images, or lower this number in policy.toml: an expert memorises a small number of images."
    return [DataError("images", expected=expected, got=f"{num}", remedy=remedy)]


def _label_problems(arrays: ImageArrays, classes: Classes | None) -> list[DataError]:
    if classes is None:
        return []
    try:
        class_numbers(read_column(arrays, "labels"), classes)
    except DataError as error:
        return [error]
    return []
