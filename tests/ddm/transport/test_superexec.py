"""A task's token reaches the program that needs it, and no command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddm.transport import superexec

TOKEN = "0123456789abcdef" * 8
PROGRAM = """
import argparse, sys
from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
parser = argparse.ArgumentParser()
parser.add_argument("--runtime-api-address")
add_args_flwr_app_common(parser)
found = try_obtain_flwr_app_token(parser.parse_args())
seen = open("/proc/self/cmdline").read() + open("/proc/self/environ").read() if sys.platform == "linux" else ""
print(found, found in seen, flush=True)
"""


def test_program_reads_its_token_from_a_descriptor_and_its_command_line_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "flwr-clientapp"
    script.write_text(f"#!{sys.executable}\n{PROGRAM}")
    script.chmod(0o700)
    monkeypatch.setattr(superexec, "program_of", lambda kind: [str(script)])
    with superexec.start_task(
        superexec.CLIENT_APP, "127.0.0.1:1", tmp_path / "ca.pem", TOKEN
    ) as process:
        assert TOKEN not in " ".join(map(str, process.args))  # type: ignore[arg-type]
        assert process.wait(120) == 0
    assert capfd.readouterr().out == f"{TOKEN} False\n"


def test_nothing_but_the_two_kinds_of_programs_is_started(tmp_path: Path) -> None:
    command = superexec.superexec_command(
        "127.0.0.1:1", tmp_path / "ca", tmp_path / "secret", "flwr-connector"
    )
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode
    assert b"flwr-connector" in result.stderr
