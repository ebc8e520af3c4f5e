"""The ids of the nearest vectors, by faiss: exactly, along a graph (hnsw), or among compressed vectors (ivf-pq)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from proxygml.files import file_checksum, written_whole

KINDS = ("exact", "hnsw", "ivf-pq")
MOST_EXACT, MOST_IN_A_GRAPH = 128_000_000, 640_000_000  # numbers, that is 1,000,000 and 5,000,000 vectors of 128
COMPARED = 16_384  # vectors at a time by exact search: of few, threads mostly wait for each other
LINKS, EFFORT_BUILDING, EFFORT = 32, 80, 128  # of hnsw: of each item, and items looked at to find them and the nearest
FEWEST_TO_TRAIN = 10_000  # vectors for ivf-pq; fewer are searched exactly
PIECE = 4  # numbers that ivf-pq compresses to a byte
CANDIDATES = 10  # for each item to be found by ivf-pq, to be compared by their own vectors
CHECKSUM_BYTES = 4
MOST_REMOVED = 0.2  # share of the items of a graph, which cannot lose any, before it is made anew


def suited(count: int, width: int) -> str:
    """The kind of index for so many vectors (count, width)."""
    numbers = count * width
    return "exact" if numbers <= MOST_EXACT else "hnsw" if numbers <= MOST_IN_A_GRAPH else "ivf-pq"


class Finder:
    """A faiss index of vectors by id, which ascend from call to call of `add`."""

    def __init__(self, kind: str, index: faiss.Index, last: int = 0) -> None:
        self.kind = kind
        self.index: Any = index  # of one of several classes, each with attributes of its own
        self.last = last  # the highest id that was ever added
        self.removed: set[int] = set()  # ids that a graph still holds
        self.forgotten = 0  # the last of the removals, by their numbers, that it knows of

    @classmethod
    def new(cls, kind: str, width: int, count: int, sample: Callable[[int], np.ndarray]) -> "Finder":
        """An empty one for about so many vectors, of which `sample` gives some to learn from."""
        if kind == "ivf-pq" and count >= FEWEST_TO_TRAIN:
            lists = lists_for(count)
            pieces = -(-width // PIECE)  # each becomes a byte
            index = faiss.IndexIVFPQ(faiss.IndexFlatL2(PIECE * pieces), PIECE * pieces, lists, pieces, 8)
            index.train(padded(sample(max(FEWEST_TO_TRAIN, 40 * lists)), index.d))
            index.nprobe = max(1, lists // 8)
            return cls(kind, index)
        if kind == "hnsw":
            graph = faiss.IndexHNSWFlat(width, LINKS)
            graph.hnsw.efConstruction = EFFORT_BUILDING
            return cls(kind, faiss.IndexIDMap2(graph))
        return cls("exact", faiss.IndexIDMap2(faiss.IndexFlatL2(width)))

    def __len__(self) -> int:
        return self.index.ntotal - len(self.removed)

    def fits(self, kind: str, count: int) -> bool:
        """Whether it serves for an index of this kind and size."""
        if kind == "ivf-pq" and count >= FEWEST_TO_TRAIN:  # what it has learned of few is outdated
            return self.kind == kind and lists_for(count) <= 2 * self.index.nlist
        return self.kind == ("exact" if kind == "ivf-pq" else kind) and len(self.removed) <= MOST_REMOVED * len(self)

    def add(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors (M, D) under ids (M,)."""
        if len(ids):
            self.index.add_with_ids(padded(vectors, self.index.d), ids)
            self.last = int(ids[-1])

    def remove(self, ids: np.ndarray) -> None:
        """Take out those of the ids (M,) that it holds."""
        if self.kind == "hnsw":
            held = faiss.vector_to_array(self.index.id_map)
            self.removed |= set(np.intersect1d(ids, held).tolist())
        else:
            self.index.remove_ids(faiss.IDSelectorBatch(ids))

    def depth(self, count: int) -> int:
        """How many candidates it gives for the `count` nearest, if it holds so many."""
        return max(100, CANDIDATES * count) if self.kind == "ivf-pq" else count + 8  # float32 may confuse a few

    def search(self, vectors: np.ndarray, count: int) -> np.ndarray:
        """Ids of candidates for the `count` nearest of vectors (M, D): (M, count or more), -1 where there are none."""
        wanted = min(self.depth(count), len(self))
        if self.kind == "hnsw":
            selector = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(sorted(self.removed), np.int64)))
            more = {"sel": selector} if self.removed else {}
            parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]  # its types lack it
                efSearch=max(EFFORT, 2 * wanted), **more
            )
            # faiss.contrib.torch_utils, which pytorch-metric-learning imports, hides it behind one without params.
            search = getattr(self.index, "search_numpy", self.index.search)
            return search(vectors, wanted, params=parameters)[1]
        before, faiss.cvar.distance_compute_blas_database_bs = faiss.cvar.distance_compute_blas_database_bs, COMPARED
        try:
            return self.index.search(padded(vectors, self.index.d), wanted)[1]
        finally:
            faiss.cvar.distance_compute_blas_database_bs = before

    def write(self, folder: Path) -> None:
        """Write it to folder/KIND-LAST.faiss, in place of any other."""
        path = folder / f"{self.kind}-{self.last}.faiss"
        with written_whole(path) as draft:
            try:
                faiss.write_index(self.index, str(draft))
            except RuntimeError as error:
                raise OSError(f"could not write {path}: {str(error).splitlines()[-1]}") from error
            checksum = file_checksum(draft)
            with draft.open("ab") as file:
                file.write(checksum.to_bytes(CHECKSUM_BYTES, "little"))
        for other in folder.glob("*.faiss"):
            if other != path and not other.name.startswith("."):
                other.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path, kind: str, width: int) -> "Finder | None":
        """What `write` wrote of vectors (width,), if anything that can be read: the database has all of it too."""
        for path in folder.glob(f"{kind}-*.faiss"):
            try:
                if not _is_sound(path):  # faiss may crash on it
                    continue
                found, last = faiss.read_index(str(path)), int(path.stem.rsplit("-", 1)[1])
            except (RuntimeError, ValueError, MemoryError, FileNotFoundError):
                continue  # damaged, or replaced by another process
            if _is_ours(found, kind, width):
                return cls(kind, found, last)
        return None


def _is_ours(index: faiss.Index, kind: str, width: int) -> bool:
    """Whether this is of the sort that `Finder.new` makes: a file of that name may hold any index of faiss."""
    if kind == "ivf-pq":
        lists = index.invlists if type(index) is faiss.IndexIVFPQ else None
        ours = lists is not None and type(faiss.downcast_InvertedLists(lists)) is faiss.ArrayInvertedLists
        return ours and index.d == PIECE * -(-width // PIECE)
    graph = faiss.downcast_index(index.index) if type(index) is faiss.IndexIDMap2 else None
    return type(graph) is faiss.IndexHNSWFlat and index.d == graph.d == width


def _is_sound(path: Path) -> bool:
    """Whether a file is as `write` wrote it, by the checksum at its end, which faiss does not read."""
    size = max(0, path.stat().st_size - CHECKSUM_BYTES)
    with path.open("rb") as file:
        file.seek(size)
        return int.from_bytes(file.read(), "little") == file_checksum(path, size)


def lists_for(count: int) -> int:
    """Into how many lists ivf-pq divides so many vectors."""
    return max(64, int(count**0.5))


def padded(vectors: np.ndarray, width: int) -> np.ndarray:
    """Vectors (M, D) with zeros at their ends, which change no distance: (M, width)."""
    missing = width - vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors
