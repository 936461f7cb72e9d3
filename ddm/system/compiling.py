"""Where torch keeps what it compiles: a folder of this process's own.

By itself torch takes a folder in `/tmp` that is named after the user. Anybody who makes that folder first puts
libraries and pickles there, which torch loads. A process that was killed would also leave unreadable files for the
next.
"""

import atexit
import os
import shutil
from tempfile import mkdtemp

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_own_compiler_folder() -> None:
    """Let torch compile into a new folder, which goes with this process; one that an operator names stays in use."""
    if _CACHE_VARIABLE not in os.environ:
        os.environ[_CACHE_VARIABLE] = mkdtemp(prefix="archipelago-compiled-")
        atexit.register(shutil.rmtree, os.environ[_CACHE_VARIABLE], ignore_errors=True)
