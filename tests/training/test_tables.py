"""Columns of CSV and Parquet files, and messages that quote no cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diminuendo.errors import InputError
from diminuendo.training import tables

TEXT = (
    '\ufeffage, income,city,sick,"a, b"\r\n40,1.5e3,Bern,0,1\r\n'
    '51,2000,"New\nYork",1,2\r\n\r\n62,10,Ulm,1,3\r\n'
)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    from pyarrow.parquet import write_table

    path = tmp_path / "t.parquet"
    columns = {
        "age": [40, 51, 62],
        "income": [1.5e3, 2000.0, 10.0],
        "city": ["Bern", "New York", "Ulm"],
        "sick": [False, True, True],
        "gap": [1.0, None, 3.0],
    }
    write_table(pyarrow.table(columns), path)
    return path


def test_csv(csv: Path) -> None:
    table = tables.read_table(csv)
    assert table.names == ("age", "income", "city", "sick", "a, b")
    x = tables.features(table, None, {"city", "sick"})
    assert x.tolist() == [[40, 1500, 1], [51, 2000, 2], [62, 10, 3]]
    assert tables.features(table, ["income", "age"], ()).tolist()[0] == [1500, 40]
    assert tables.labels(table, "sick", None).tolist() == [0, 1, 1]
    assert tables.labels(table, "sick", ["1", "0"]).tolist() == [1, 0, 0]
    assert tables.numbers(table, "income", "target").tolist() == [1500, 2000, 10]
    assert tables.texts(table, "city", "groups") == ["Bern", "New\nYork", "Ulm"]


def test_parquet(parquet: Path) -> None:
    table = tables.read_table(parquet)
    assert table.names == ("age", "income", "city", "sick", "gap")
    x = tables.features(table, ["age", "sick"], ())
    assert x.tolist() == [[40, 0], [51, 1], [62, 1]]
    assert tables.labels(table, "city", ["Ulm", "Bern", "New York"]).tolist() == [1, 2, 0]
    for name in ("city", "gap"):
        with pytest.raises(InputError, match=f"the column '{name}'") as error:
            tables.features(table, ["age", name], ())
        assert "Bern" not in str(error.value)


def test_both_give_the_same(csv: Path, parquet: Path) -> None:
    one, other = tables.read_table(csv), tables.read_table(parquet)
    names = ["age", "income", "sick"]
    assert np.array_equal(tables.features(one, names, ()), tables.features(other, names, ()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,SECRET\n", "the column 'b', row 1"),
        ("a,b\n1,2\n1,\n", "the column 'b', row 2"),
        ("a,b\n1,2\n1\n", "as many cells"),
        ("a,a\n1,2\n", "a different title"),
        ("a,\n1,2\n", "a different title"),
        ("", "a different title"),
    ],
)
def test_damaged_csv(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        tables.features(tables.read_table(path), None, ())
    assert "SECRET" not in str(error.value)


def test_what_a_target_may_be(csv: Path) -> None:
    table = tables.read_table(csv)
    with pytest.raises(InputError, match="one of the 2 classes in every row") as error:
        tables.labels(table, "city", ["Bern", "Ulm"])
    assert "York" not in str(error.value)
    with pytest.raises(InputError, match="different from each other"):
        tables.labels(table, "city", ["Bern", "Bern"])
    with pytest.raises(InputError, match="a number in every row"):
        tables.labels(table, "city", None)
    with pytest.raises(InputError, match="a column in target"):
        tables.labels(table, "town", None)
    for bad in ("-1", "0.5", "nan", "inf", "1e300"):
        csv.write_text(f"x,y\n1,{bad}\n")
        with pytest.raises(InputError, match="target_type"):
            tables.labels(tables.read_table(csv), "y", None)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(InputError, match="No such file"):
            tables.read_table(tmp_path / name)
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(InputError, match="a Parquet file"):
        tables.read_table(tmp_path / "text.parquet")
