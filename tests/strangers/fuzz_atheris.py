"""Coverage-guided search for bytes that a parser neither reads nor refuses as documented.

    python -m tests.strangers.fuzz_atheris PARSER [SECONDS] [FOLDER]

PARSER is a name from `tests.support.parsers` or of a kind of file below; FOLDER keeps what was found. A temporary
folder in memory (TMPDIR=/dev/shm) makes parsers of files a thousand times as fast.
Needs Google's atheris, which is not among the dependencies; without it this says so and ends.
"""

import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

Parser = Callable[[bytes], None]


def parsers(folder: Path) -> dict[str, tuple[bytes, Parser]]:
    """Every parser with an honest sample; imported here, so that whoever calls may watch what they run through."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from safetensors.torch import save

    from ddm.errors import DataError, FormatError, SetupError, TensorFileError
    from ddm.images.array_files import read_images
    from ddm.images.columns import captions_of
    from ddm.images.csv_text import csv_format, read_records
    from ddm.images.idx import read_idx
    from ddm.images.parquet_footer import read_footer
    from ddm.io.settings import load_settings
    from ddm.io.tensors import TensorSpec, load_tensors, read_header
    from silo.config import Policy
    from tests.strangers.test_archives import SPEC, npz
    from tests.strangers.test_bounds import SCALAR, tensors
    from tests.strangers.test_parsers import try_door
    from tests.support.parsers import ParserCase, document_parsers, log_parsers, message_parsers

    def of_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def parse(data: bytes) -> object:
            (folder / "x").write_bytes(data)
            return read(folder / "x")

        return parse

    def read_captions(data: bytes) -> object:
        return captions_of(np.array(data.split(b"\n"), object))

    def read_table(path: Path) -> object:
        layout = csv_format(path, lambda header: "path" in header)
        return list(read_records(path, layout))

    def read_class_counts(path: Path) -> object:
        return load_tensors(path, {"counts": TensorSpec("I64", (2, 3))}, max_bytes=1 << 16)

    footer = BytesIO()
    pq.write_table(pa.table({"path": ["a.png", "b.png"], "label": [0, 1]}), footer)
    one = tensors(b"{" + SCALAR % (0, 0, 1) + b"}", b"\0")
    files = {
        "tensors": ParserCase(
            one, of_file(lambda path: read_header(path, max_bytes=1 << 22)), (TensorFileError,)
        ),
        "images": ParserCase(npz(), of_file(lambda path: read_images(path, SPEC)), (DataError,)),
        "configuration": ParserCase(
            b"", of_file(lambda path: load_settings(Policy, path)), (SetupError, FormatError)
        ),
        "table": ParserCase(b"path;label\na.png;1\n", of_file(read_table), (DataError,)),
        "captions": ParserCase("a chest\nä\n".encode(), read_captions, (DataError,)),
        "idx": ParserCase(b"\0\0\x08\1\0\0\0\2ab", of_file(read_idx), (DataError,)),
        "parquet footer": ParserCase(footer.getvalue(), of_file(read_footer), (DataError,)),
        "class counts": ParserCase(
            save({"counts": torch.zeros(2, 3, dtype=torch.int64)}),
            of_file(read_class_counts),
            (TensorFileError,),
        ),
    }

    def parser(door: ParserCase) -> Parser:
        return lambda data: try_door(door, data)

    return {
        name: (door.sample, parser(door))
        for name, door in {
            **document_parsers(),
            **message_parsers(),
            **log_parsers(),
            **files,
        }.items()
    }


def main(name: str = "", seconds: str = "600", folder: str = "") -> int:
    """Search until something is found, or for the seconds given."""
    try:
        import atheris  # type: ignore[import-not-found]
    except ImportError:
        print("skipped: atheris is not installed")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        with atheris.instrument_imports(include=["ddm", "silo", "tomllib", "json"]):
            known = parsers(Path(scratch))
        if name not in known:
            print(f"expected one of: {', '.join(known)}")
            return 2
        corpus = Path(folder or scratch, "corpus")
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / "honest").write_bytes(known[name][0])
        limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], known[name][1])
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
