"""The k nearest proxies of each sample, Eq. 2 to 4, for any number of proxies: block-wise top-k over chunks.

At most CHUNK_ELEMENTS of the similarities (B, CN) are in memory at a time. docs/performance.md has the measurements.
"""

import torch
from torch import Tensor

PROXY_ELEMENTS = 2**20  # numbers of proxies that are multiplied, scaled and projected while they are in the cache
GPU_PROXY_ELEMENTS = 2**26
CHUNK_ELEMENTS = 2**21  # similarities in memory at a time: fresh memory costs more time than products do
GPU_CHUNK_ELEMENTS = 2**27
BLOCKS = (16, 8, 4)  # columns; only the largest of a block enters the first round of top-k; all divide the first
MIN_NORM = 1e-12  # what a vector is divided by at least, as in F.normalize


def nearest_proxies(
    samples: Tensor, vectors: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k proxies (B, k) of each sample that rank first, ascending, their cosines (B, k), 1 / norm of all (CN,).

    Unit samples (B, D) and vectors (CN, D) of any norm, ranked by cosine, to which `positive_bonus` is added for the
    proxies of a sample's own class, `own` (B, N).
    """
    total, per_class = len(vectors), own.shape[1]
    inverse_norms = samples.new_empty(total)
    width = min(total, max(1, chunk_elements(vectors) // len(samples)))
    held = _empty_tiles(samples, width)
    own_cosines = samples.new_empty(own.shape)
    nearest, ranks = own[:, :0], samples[:, :0]  # (B, up to k) so far
    for chunk in chunks(total, width):
        values = _cosines(samples, vectors[chunk], inverse_norms[chunk], held)  # (tiles, B, columns of a tile)
        place, here = _within(own - chunk.start, chunk.stop - chunk.start)
        place = _places(values, place)  # (B, N)
        own_cosines = torch.where(here, values.take(place), own_cosines)
        values.view(-1).index_add_(0, place.flatten(), positive_bonus * here.flatten().to(values.dtype))  # Eq. 3
        if ranks.shape[1] < links:
            found, here_ranks = _largest(values, min(links, chunk.stop - chunk.start))
        else:  # only what is nearer than the farthest so far can be among the nearest
            found, here_ranks = _larger(values, ranks.amin(1, keepdim=True))
        nearest = torch.cat([nearest, found + chunk.start], dim=1)
        ranks = torch.cat([ranks, here_ranks], dim=1)
        if ranks.shape[1] > links:
            ranks, kept = ranks.topk(links, sorted=False)
            nearest = nearest.gather(1, kept)
    linked, order = nearest.sort(dim=1)
    place, positive = _within(linked - own[:, :1], per_class)
    cosines = torch.where(positive, own_cosines.gather(1, place), ranks.gather(1, order))  # a difference would round
    return linked, cosines, inverse_norms


def topk_in_order(
    sample: Tensor, vectors: Tensor, inverse_norms: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k proxies (k,) of one sample (D,) that rank first, of equal ones the first; their cosines and ranks (k,)."""
    cosines = (vectors @ sample).mul_(inverse_norms)  # (CN,)
    own, here = _within(own, len(vectors))
    ranks = cosines.index_add(0, own, positive_bonus * here.to(cosines.dtype))
    edge = ranks.topk(links, sorted=False).values.amin()
    equal = (ranks == edge).nonzero()[:, 0]
    larger = (ranks > edge).nonzero()[:, 0]
    linked = torch.cat([larger, equal[: links - len(larger)]]).sort().values
    return linked, cosines[linked], ranks[linked]


def _within(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Places moved into 0..size - 1, and which were there already."""
    moved = places.clamp(0, size - 1)
    return moved, moved == places


def _empty_tiles(samples: Tensor, width: int) -> Tensor:
    """BufferPool for the similarities of samples (B, D) and `width` proxies: (tiles, B, columns of a tile).

    A product in tiles of some hundred columns takes two thirds of the time of a wide one, and the largest entries in
    the same place of some tiles are found along their rows.
    """
    columns = max(1, min(rows_per_chunk(samples), width) // BLOCKS[0])
    return samples.new_empty(_rounded_up(-(-width // columns)), len(samples), columns)


def _rounded_up(tiles: int) -> int:
    """To as many tiles as whole blocks have."""
    return -(-tiles // BLOCKS[0]) * BLOCKS[0]


def _cosines(samples: Tensor, vectors: Tensor, inverse_norms: Tensor, tiles: Tensor) -> Tensor:
    """Of unit samples (B, D) and vectors (P, D), in as many of the tiles as it takes, the rest of them -inf.

    1 / norm of the vectors goes into (P,), computed while they are in the cache for the product.
    """
    columns = tiles.shape[2]
    whole = len(vectors) // columns  # tiles
    for chunk in chunks(whole, max(1, rows_per_chunk(vectors) // columns)):
        rows = slice(chunk.start * columns, chunk.stop * columns)
        side = vectors[rows].view(-1, columns, vectors.shape[1])  # (tiles, columns, D)
        invert_norms(vectors[rows], out=inverse_norms[rows])
        torch.bmm(samples.expand(len(side), -1, -1), side.transpose(1, 2), out=tiles[chunk])
        tiles[chunk] *= inverse_norms[rows].view(-1, 1, columns)
    rows = slice(whole * columns, len(vectors))  # less than a tile
    tiles = tiles[: _rounded_up(-(-len(vectors) // columns))]
    tiles[whole:] = -torch.inf
    if rows.start < rows.stop:
        invert_norms(vectors[rows], out=inverse_norms[rows])
        tiles[whole, :, : rows.stop - rows.start] = (samples @ vectors[rows].T).mul_(inverse_norms[rows])
    return tiles


def _places(values: Tensor, columns: Tensor) -> Tensor:
    """Where in the memory of values (tiles, B, columns of a tile) the columns (B, K) of each row are: (B, K)."""
    _, batch, width = values.shape
    row = torch.arange(batch, device=columns.device)[:, None]
    return (columns // width * batch + row) * width + columns % width


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns (B, count) of the largest entries of each row, in any order, and these: values (tiles, B, columns).

    In two rounds where few are asked for: the blocks with the largest maxima hold all of them.
    """
    tiles, _, columns = values.shape
    size = next((size for size in BLOCKS if tiles * columns >= 4 * count * size), 1)
    if size == 1:
        ranks, found = _flat_rows(values).topk(count, sorted=False)
        return found, ranks
    block = _maxima(values, size).topk(count, sorted=False).indices  # (B, count)
    ranks, best = _of_blocks(values, block, size).topk(count, sorted=False)
    return block.gather(1, best % count) + tiles * columns // size * (best // count), ranks


def _larger(values: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (B, some) of all entries of each row that are larger than its edge (B, 1), and these entries.

    As many for every row; others are among them.
    """
    tiles, _, columns = values.shape
    size = BLOCKS[0]
    maxima = _maxima(values, size)
    exceeding = (maxima > edge).nonzero()[:, 0]  # of each such block the row; sum() is slower
    block = maxima.topk(int(exceeding.bincount(minlength=1).amax()), sorted=False).indices  # (B, some)
    first = tiles * columns // size * torch.arange(size, device=block.device)[:, None]
    return (block[:, None] + first).flatten(1), _of_blocks(values, block, size)


def _flat_rows(values: Tensor) -> Tensor:
    """(tiles, B, columns) -> (B, tiles * columns)"""
    return values.permute(1, 0, 2).flatten(1)


def _maxima(values: Tensor, size: int) -> Tensor:
    """Of blocks of `size` entries: values (tiles, B, columns) -> (B, blocks). Block j has columns j, j + blocks, ..."""
    return _flat_rows(values.unflatten(0, (size, -1)).amax(0))


def _of_blocks(values: Tensor, block: Tensor, size: int) -> Tensor:
    """The entries of blocks (B, count), first those that come first in each: (B, size * count)."""
    step = values.numel() // size * torch.arange(size, device=block.device)[:, None]
    return values.take((_places(values, block)[:, None] + step).flatten(1))


def invert_norms(vectors: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / norm of vectors (P, D): (P,)."""
    return torch.linalg.vector_norm(vectors, dim=1, out=out).clamp_min_(MIN_NORM).reciprocal_()


def chunk_elements(vectors: Tensor) -> int:
    """How many similarities are held at a time."""
    return CHUNK_ELEMENTS if vectors.device.type == "cpu" else GPU_CHUNK_ELEMENTS


def rows_per_chunk(vectors: Tensor) -> int:
    """How many of them are taken at a time."""
    return max(1, (PROXY_ELEMENTS if vectors.device.type == "cpu" else GPU_PROXY_ELEMENTS) // vectors.shape[1])


def chunks(total: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, total)) for first in range(0, total, most)]
