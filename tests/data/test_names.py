"""Many texts in little memory, that behave as a sequence of texts."""

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
def test_names_are_a_sequence_of_the_texts_they_were_made_of(texts: list[str], data: st.DataObject) -> None:
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


def test_a_place_beyond_the_end_is_an_error_and_bytes_that_are_no_text_survive() -> None:
    assert Names(["\udcff.jpg"])[0] == "\udcff.jpg"
    with pytest.raises(IndexError):
        Names(["a"])[1]


def test_a_long_table_takes_little_more_memory_than_its_text(tmp_path: Path) -> None:
    """A list of Python's texts would take about 100 bytes for each image beside its characters."""
    lines, classes = 50_000, 200
    file = tmp_path / "table.csv"
    file.write_text("path,label\n" + "".join(f"{row:08d}.jpg,{row % classes}\n" for row in range(lines)))
    table.load(file)  # imports what it needs
    tracemalloc.start()
    both = table.load(file)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, both)) == lines
    assert taken / lines < 12 + 8 + 8 + 12  # characters, where each ends, its label, and some to spare


def test_texts_can_be_joined_and_kept_as_arrays() -> None:
    first, second = Names(["a", "", "caf\u00e9"]), Names(["no text: \udcff", "z"])
    joined = Names()
    for names in (first, second, Names()):
        joined.extend(names)
    assert list(joined) == [*first, *second]
    assert Names.unpacked(*joined.packed()) == joined
    assert list(Names.unpacked(*Names().packed())) == []


@pytest.mark.parametrize(
    ("block", "ends"),
    [
        (np.zeros(3, np.uint8), np.array([2])),
        (np.zeros(3, np.uint8), np.array([4])),
        (np.zeros(3, np.uint8), np.array([2, 1, 3])),
        (np.zeros(3, np.uint8), np.array([-1, 3])),
        (np.zeros(3, np.uint8), np.array([3.0])),
        (np.zeros(3, np.uint8), np.empty(0, np.int64)),
    ],
)
def test_arrays_that_are_no_texts_are_refused(block: np.ndarray, ends: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected"):
        Names.unpacked(block, ends)
