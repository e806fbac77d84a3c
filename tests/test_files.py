"""Files are written whole or not at all, and the system's refusals are told plainly."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from diminuendo import _files
from diminuendo.errors import InputError


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")

    def fail() -> None:
        with _files.writing(target) as handle:
            handle.write(b"ne")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_reader_sees_the_old_file_until_the_end(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    with _files.writing(target) as handle:
        handle.write(b"new")
        handle.flush()
        assert target.read_text() == "old"
    assert target.read_text() == "new"


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _files.write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_links_are_followed_and_pipes_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _files.write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"
    reader, writer = os.pipe()
    try:
        _files.write_text(f"/dev/fd/{writer}", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


def test_the_systems_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the output to be a file that can.*No such file"):
        _files.write_text(tmp_path / "missing" / "a", "text")
    with pytest.raises(InputError, match=r"Expected a to be a readable text.*No such file"):
        _files.read_text(tmp_path / "a", name="a")
    (tmp_path / "b").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="not UTF-8 text"):
        _files.read_text(tmp_path / "b", name="b")
    with pytest.raises(InputError, match="Is a directory"):
        _files.read_bytes(tmp_path, name="c")
    with pytest.raises(InputError, match="a folder that can be made"):
        _files.make_folder(tmp_path / "b" / "c")
