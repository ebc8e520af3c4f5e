"""A faiss index by item id: exact, a graph (hnsw), or inverted lists of compressed vectors (ivf-pq)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from proxygml.files import atomic_write, file_checksum
from proxygml.retrieval.contents import FAISS_FILE

KINDS = ("exact", "hnsw", "ivf-pq")
MAX_EXACT_ELEMENTS, MAX_HNSW_ELEMENTS = 128_000_000, 640_000_000  # 1,000,000 and 5,000,000 vectors of 128
BLAS_BLOCK = 16_384  # vectors per product of an exact search: with fewer, threads mostly wait for each other
MIN_BLAS_QUERIES = 4  # from which on a product takes less time than each query alone; with 16, a third
HNSW_LINKS, EF_CONSTRUCTION, EF_SEARCH = 32, 80, 128
MIN_TRAINING_VECTORS = 10_000  # for ivf-pq; fewer are searched exactly
SUBVECTOR_DIM = 4  # elements that ivf-pq compresses to a byte
CANDIDATES_PER_HIT = 10  # of ivf-pq, which are compared again by their full vectors
CHECKSUM_BYTES = 4
MAX_REMOVED_FRACTION = 0.2  # of a graph, which cannot drop items, before it is rebuilt


def suggest_kind(count: int, dim: int) -> str:
    """The kind of index for vectors (count, dim)."""
    elements = count * dim
    return "exact" if elements <= MAX_EXACT_ELEMENTS else "hnsw" if elements <= MAX_HNSW_ELEMENTS else "ivf-pq"


class VectorIndex:
    """A faiss index of vectors by id; ids must ascend from one `add` to the next."""

    def __init__(self, kind: str, index: faiss.Index, last_id: int = 0) -> None:
        self.kind = kind
        self.index: Any = index  # its subclasses differ in their attributes
        self.last_id = last_id  # the highest id ever added
        self.removed: set[int] = set()  # ids still in a graph
        self.last_removal = 0  # number of the last row of the table `removed` that was applied
        self.origin: np.ndarray | None = None  # (D,), for exact search; of the first vectors that were added

    @classmethod
    def new(cls, kind: str, dim: int, count: int, sample: Callable[[int], np.ndarray]) -> "VectorIndex":
        """An empty index for about `count` vectors; `sample(n)` returns n of them (n, D) to train ivf-pq."""
        if kind == "ivf-pq" and count >= MIN_TRAINING_VECTORS:
            lists = num_lists(count)
            subvectors = -(-dim // SUBVECTOR_DIM)
            padded_dim = SUBVECTOR_DIM * subvectors
            index = faiss.IndexIVFPQ(faiss.IndexFlatL2(padded_dim), padded_dim, lists, subvectors, 8)
            index.train(pad(sample(max(MIN_TRAINING_VECTORS, 40 * lists)), index.d))
            index.nprobe = max(1, lists // 8)
            return cls(kind, index)
        if kind == "hnsw":
            graph = faiss.IndexHNSWFlat(dim, HNSW_LINKS)
            graph.hnsw.efConstruction = EF_CONSTRUCTION
            return cls(kind, faiss.IndexIDMap2(graph))
        return cls("exact", faiss.IndexIDMap2(faiss.IndexFlatL2(dim)))

    def __len__(self) -> int:
        return self.index.ntotal - len(self.removed)

    def fits(self, kind: str, count: int) -> bool:
        """Whether it still serves for an index of this kind and size, or must be rebuilt."""
        if kind == "ivf-pq" and count >= MIN_TRAINING_VECTORS:  # its lists were trained on too few vectors
            return self.kind == kind and num_lists(count) <= 2 * self.index.nlist
        few_removed = len(self.removed) <= MAX_REMOVED_FRACTION * len(self)
        return self.kind == ("exact" if kind == "ivf-pq" else kind) and few_removed

    def add(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors (M, D) under ids (M,)."""
        if len(ids):
            if self.kind == "exact" and self.origin is None:
                self.origin = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
            self.index.add_with_ids(pad(self._centered(vectors), self.index.d), ids)
            self.last_id = int(ids[-1])

    def remove(self, ids: np.ndarray) -> None:
        """Remove ids (M,); unknown ones are ignored."""
        if self.kind == "hnsw":
            present = faiss.vector_to_array(self.index.id_map)
            self.removed |= set(np.intersect1d(ids, present).tolist())
        else:
            self.index.remove_ids(faiss.IDSelectorBatch(ids))

    def num_candidates(self, count: int) -> int:
        """How many candidates a search for the `count` nearest returns, if there are that many."""
        return max(100, CANDIDATES_PER_HIT * count) if self.kind == "ivf-pq" else count + 8  # float32 may swap a few

    def search(self, vectors: np.ndarray, count: int) -> np.ndarray:
        """Ids of candidates for the `count` nearest of vectors (M, D): (M, count or more), filled up with -1."""
        num_candidates = min(self.num_candidates(count), len(self))
        if not num_candidates:
            return np.empty((len(vectors), 0), np.int64)
        if self.kind == "hnsw":
            selector = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(sorted(self.removed), np.int64)))
            parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]  # missing in faiss's stubs
                efSearch=max(EF_SEARCH, 2 * num_candidates), **({"sel": selector} if self.removed else {})
            )
            # faiss.contrib.torch_utils, imported by pytorch-metric-learning, replaces search by one without params.
            search = getattr(self.index, "search_numpy", self.index.search)
            return search(vectors, num_candidates, params=parameters)[1]
        settings = faiss.cvar
        defaults = settings.distance_compute_blas_database_bs, settings.distance_compute_blas_threshold
        settings.distance_compute_blas_database_bs = BLAS_BLOCK
        if len(vectors) >= MIN_BLAS_QUERIES:
            settings.distance_compute_blas_threshold = 1
        try:
            return self.index.search(pad(self._centered(vectors), self.index.d), num_candidates)[1]
        finally:
            settings.distance_compute_blas_database_bs, settings.distance_compute_blas_threshold = defaults

    def _centered(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors (M, D) minus the origin: products of vectors far from zero would lose the digits of distances."""
        return vectors if self.origin is None else vectors - self.origin

    def write(self, folder: Path) -> None:
        """Write folder/KIND-LAST_ID.faiss and remove older ones."""
        path = folder / f"{self.kind}-{self.last_id}.faiss"
        with atomic_write(path) as draft:
            try:
                faiss.write_index(self.index, str(draft))
            except RuntimeError as error:
                raise OSError(f"could not write {path}: {str(error).splitlines()[-1]}") from error
            checksum = file_checksum(draft)
            with draft.open("ab") as file:
                file.write(checksum.to_bytes(CHECKSUM_BYTES, "little"))
        for other in folder.glob("*.faiss"):
            if other != path and FAISS_FILE.fullmatch(other.name):
                other.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path, kind: str, dim: int) -> "VectorIndex | None":
        """What `write` wrote for vectors (M, dim), or None if it is missing or damaged: the database can rebuild it."""
        for path in folder.glob(f"{kind}-*.faiss"):
            try:
                if not _has_valid_checksum(path):  # faiss may crash on a damaged file
                    continue
                index, last_id = faiss.read_index(str(path)), int(path.stem.rsplit("-", 1)[1])
            except (RuntimeError, ValueError, MemoryError, FileNotFoundError):
                continue  # damaged, or replaced by another process
            if _has_our_type(index, kind, dim):
                return cls(kind, index, last_id)
        return None


def _has_our_type(index: faiss.Index, kind: str, dim: int) -> bool:
    """Whether `VectorIndex.new` makes such an index: a .faiss file may contain any other."""
    if kind == "ivf-pq":
        lists = index.invlists if type(index) is faiss.IndexIVFPQ else None
        in_memory = lists is not None and type(faiss.downcast_InvertedLists(lists)) is faiss.ArrayInvertedLists
        return in_memory and index.d == SUBVECTOR_DIM * -(-dim // SUBVECTOR_DIM)
    graph = faiss.downcast_index(index.index) if type(index) is faiss.IndexIDMap2 else None
    return type(graph) is faiss.IndexHNSWFlat and index.d == graph.d == dim


def _has_valid_checksum(path: Path) -> bool:
    """Compare a file with the checksum at its end, which faiss does not read."""
    size = max(0, path.stat().st_size - CHECKSUM_BYTES)
    with path.open("rb") as file:
        file.seek(size)
        return int.from_bytes(file.read(), "little") == file_checksum(path, size)


def num_lists(count: int) -> int:
    """The number of inverted lists for `count` vectors."""
    return max(64, int(count**0.5))


def pad(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Vectors (M, D) with zeros appended, which change no distance: (M, dim)."""
    missing = dim - vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors
