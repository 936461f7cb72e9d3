"""What imports torchvision works beside a torch that its operators do not fit: in a user's own program and in tools."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.system.torchvision_startup import STARTUP_FILE, install_startup_file, operators_fit

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "experts-trained-elsewhere.md"


def python(code: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own, without the environment's own startup file."""
    return subprocess.run(
        [sys.executable, *options, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def test_users_own_imports_work_after_import_ddm() -> None:
    ended = python(
        "import ddm\nimport timm\nfrom diffusers import UNet2DModel\nprint(timm.__name__)"
    )
    assert (ended.returncode, ended.stdout) == (0, "timm\n"), ended.stderr


def test_code_of_the_how_to_runs_as_typed() -> None:
    block = re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), flags=re.DOTALL)[0]
    ended = python(block)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_startup_file_lets_accelerate_start_which_knows_nothing_of_ddm(tmp_path: Path) -> None:
    assert install_startup_file(tmp_path, fits=False)
    ended = python(
        f"import site, sys\nsite.addsitedir({str(tmp_path)!r})\nsys.argv = ['accelerate', '--help']\n"
        "from accelerate.commands.accelerate_cli import main\nmain()"
    )
    assert ended.returncode == 0, ended.stderr
    assert "launch" in ended.stdout


def test_startup_file_goes_where_torchvision_fits_torch(tmp_path: Path) -> None:
    assert install_startup_file(tmp_path, fits=False)
    assert not install_startup_file(tmp_path, fits=True)
    assert not (tmp_path / STARTUP_FILE).exists()


def test_startup_file_is_silent_once_archipelago_is_removed(tmp_path: Path) -> None:
    install_startup_file(tmp_path, fits=False)
    # -S and -P: neither the environment's packages nor this repository are on the path, so there is no ddm.
    ended = python(f"import site; site.addsitedir({str(tmp_path)!r})", "-S", "-P")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(operators_fit(), reason="torchvision fits torch here, and needs no guard")
def test_without_the_guard_the_import_fails() -> None:
    # Without `site` no startup file is read; the folder of the packages is named instead.
    packages = Path(pytest.__file__).parents[1]
    ended = python(f"import sys; sys.path.append({str(packages)!r}); import torchvision", "-S")
    assert ended.returncode != 0
    assert "torchvision::nms" in ended.stderr


def test_guard_imports_no_torch() -> None:
    ended = python("import ddm, sys; sys.exit('torch' in sys.modules)")
    assert ended.returncode == 0, ended.stderr
