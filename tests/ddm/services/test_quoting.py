"""Values in the files of services: read back as they were, in a unit, a command and a script, or refused."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm.errors import ArchipelagoError, BusyError, SetupError
from ddm.services.quoting import (
    Quoted,
    command_line,
    image_name,
    mount,
    shell_word,
    unit_word,
    user_name,
)
from ddm.services.units import template_environment, write_services
from tests.support.services import words_of

printable = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "), min_size=1
)
AWKWARD = (
    "/srv/Klinik Süd/Bilder",
    '/a"b',
    "/a'b",
    "/50%/x",
    "/a\\b",
    "/$HOME/${x}",
    "/a;b",
    "/#x",
    "-",
    " ",
    "%h",
    "=",
)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_path_is_one_word_of_a_unit_and_of_a_script(text: str) -> None:
    assert words_of(unit_word(text)) == [text]
    said = subprocess.run(
        ["sh", "-c", f"printf %s {shell_word(text)}"], capture_output=True, text=True, check=True
    )
    assert said.stdout == text


@settings(max_examples=40)
@given(st.lists(printable, min_size=1, max_size=3))
def test_command_of_a_unit_reads_back_as_its_words(words: list[str]) -> None:
    line = command_line(words).replace("\\\n", " ")
    assert [word.replace("$$", "$") for word in words_of(line)] == words


@pytest.mark.parametrize("text", ["/a\nExecStart=/bin/sh", "/a\x00b", "/a\u2028b", "/a\u202eb", ""])
def test_text_that_could_end_a_line_is_refused(text: str) -> None:
    for quote in (unit_word, shell_word):
        with pytest.raises(SetupError):
            quote(text)


@pytest.mark.parametrize("name", ["root;x", "a b", "-x", "Ä", "", "a" * 40, "%n"])
def test_name_of_a_user_or_image_that_could_be_more_is_refused(name: str) -> None:
    for check in (user_name, image_name):
        if check is user_name or not name.startswith("a" * 40):
            with pytest.raises(SetupError):
                check(name)


def test_path_with_a_comma_or_colon_is_refused_for_a_mount(tmp_path) -> None:
    assert (
        mount(tmp_path / "Süd 1")
        == f"--mount=type=bind,src={tmp_path}/Süd 1,dst={tmp_path}/Süd 1,ro=true"
    )
    for sign in ",:":
        with pytest.raises(SetupError) as refused:
            mount(tmp_path / f"a{sign}b")
        assert "--kind systemd" in refused.value.remedy


def test_template_takes_nothing_that_was_not_quoted() -> None:
    template = template_environment("ddm").from_string("A={{ value }}\n")
    assert template.render(value=Quoted("x")) == "A=x\n"
    with pytest.raises(ArchipelagoError):
        template.render(value="x")


def test_services_never_mix_with_other_files(tmp_path) -> None:
    folder = tmp_path / "system"
    folder.mkdir()
    (folder / "sshd.service").touch()
    (folder / "a.service").write_text("installed")
    with pytest.raises(BusyError):
        write_services(folder, {"a.service": "1", "prepare.sh": "2"})
    assert (folder / "a.service").read_text() == "installed"


def test_services_are_written_again_beside_the_wheelhouse_that_an_operator_put_there(
    tmp_path,
) -> None:
    write_services(tmp_path / "out", {"a.service": "1", "Containerfile": "2"})
    (tmp_path / "out" / "wheelhouse").mkdir()
    write_services(tmp_path / "out", {"a.service": "3", "Containerfile": "2"})
    assert (tmp_path / "out" / "a.service").read_text() == "3"
