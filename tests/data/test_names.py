"""Compact sequences of strings."""

import copy
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxygml.data import table
from proxygml.data.names import Names

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8))


@given(texts=TEXTS, data=st.data())
def test_names_equal_a_list(texts: list[str], data: st.DataObject) -> None:
    names = Names(texts)
    assert len(names) == len(texts)
    assert list(names) == texts
    assert names == texts == names
    assert names == Names(texts)
    assert names != [*texts, "more"]
    assert pickle.loads(pickle.dumps(names)) == copy.deepcopy(names) == texts
    assert np.array(names).tolist() == texts or not texts
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1))) if texts else []
    assert names.take(np.array(chosen, dtype=np.int64)) == [texts[place] for place in chosen]
    assert names[::-2] == texts[::-2]
    for place in range(-len(texts), len(texts)):
        assert names[place] == texts[place]


def test_index_error_and_non_utf8() -> None:
    assert Names(["\udcff.jpg"])[0] == "\udcff.jpg"
    with pytest.raises(IndexError):
        Names(["a"])[1]


@pytest.mark.slow
def test_memory_of_a_long_table(tmp_path: Path) -> None:
    """A list of Python strings would take about 100 bytes per image besides its characters."""
    lines, classes = 20_000, 200
    file = tmp_path / "table.csv"
    file.write_text("path,label\n" + "".join(f"{row:08d}.jpg,{row % classes}\n" for row in range(lines)))
    table.load(file)  # does the imports
    tracemalloc.start()
    both = table.load(file)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, both)) == lines
    assert taken / lines < 12 + 8 + 8 + 12  # characters, end, label and a margin
