"""The k nearest proxies of each sample, Eq. 2 to 4, for any number of proxies: block-wise top-k over chunks.

At most CHUNK_ELEMENTS of the similarities (B, CN) are in memory at a time. docs/performance.md has the measurements.
"""

import torch
from torch import Tensor

from proxygml.losses.interface import MIN_NORM

PROXY_ELEMENTS = 2**20  # elements of the proxies that stay in the cache while they are multiplied, scaled and projected
GPU_PROXY_ELEMENTS = 2**26
CHUNK_ELEMENTS = 2**21  # similarities in memory at a time: allocating more would cost more time than the products
GPU_CHUNK_ELEMENTS = 2**27
BLOCKS = (16, 8, 4)  # block sizes of the first round of top-k, which sees only block maxima; all divide the first


def nearest_proxies(
    samples: Tensor, vectors: Tensor, own: Tensor, links: int, positive_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k first-ranked proxies of each sample (B, k), ascending, their cosines (B, k), and 1 / norm of all (CN,).

    Unit samples (B, D) and vectors (CN, D) of any norm are ranked by cosine, plus `positive_bonus` for the proxies of
    the sample's own class, `own` (B, N).
    """
    total, per_class = len(vectors), own.shape[1]
    inverse_norms = samples.new_empty(total)
    width = min(total, max(1, chunk_elements(vectors) // len(samples)))
    tiles = _empty_tiles(samples, width)
    own_cosines = samples.new_empty(own.shape)
    nearest, ranks = own[:, :0], samples[:, :0]  # (B, up to k) so far
    for chunk in chunks(total, width):
        values = _cosines(samples, vectors[chunk], inverse_norms[chunk], tiles)  # (tiles, B, columns of a tile)
        columns, inside = _clamp(own - chunk.start, chunk.stop - chunk.start)
        index = _flat_index(values, columns)  # (B, N)
        own_cosines = torch.where(inside, values.take(index), own_cosines)
        values.view(-1).index_add_(0, index.flatten(), positive_bonus * inside.flatten().to(values.dtype))  # Eq. 3
        if ranks.shape[1] < links:
            columns, chunk_ranks = _topk(values, min(links, chunk.stop - chunk.start))
        else:  # only proxies nearer than the current k-th can enter
            columns, chunk_ranks = _above(values, ranks.amin(1, keepdim=True))
        nearest = torch.cat([nearest, columns + chunk.start], dim=1)
        ranks = torch.cat([ranks, chunk_ranks], dim=1)
        if ranks.shape[1] > links:
            ranks, kept = ranks.topk(links, sorted=False)
            nearest = nearest.gather(1, kept)
    linked, order = nearest.sort(dim=1)
    columns, positive = _clamp(linked - own[:, :1], per_class)
    # Subtracting the bonus from the rank would round.
    cosines = torch.where(positive, own_cosines.gather(1, columns), ranks.gather(1, order))
    return linked, cosines, inverse_norms


def _clamp(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Indices clamped to 0..size - 1, and which of them were inside."""
    clamped = index.clamp(0, size - 1)
    return clamped, clamped == index


def _empty_tiles(samples: Tensor, width: int) -> Tensor:
    """Memory for the similarities of samples (B, D) and `width` proxies: (tiles, B, columns of a tile).

    A product in tiles of some hundred columns takes two thirds of the time of a wide one, and block maxima over tiles
    are reductions along the first axis.
    """
    columns = max(1, min(rows_per_chunk(samples), width) // BLOCKS[0])
    return samples.new_empty(_whole_blocks(-(-width // columns)), len(samples), columns)


def _whole_blocks(tiles: int) -> int:
    """The number of tiles, rounded up to a multiple of the largest block."""
    return -(-tiles // BLOCKS[0]) * BLOCKS[0]


def _cosines(samples: Tensor, vectors: Tensor, inverse_norms: Tensor, tiles: Tensor) -> Tensor:
    """Cosines of unit samples (B, D) and vectors (P, D), written to the first tiles and padded with -inf.

    Writes 1 / norm of the vectors to `inverse_norms` (P,), while the vectors are in the cache for the product.
    """
    columns = tiles.shape[2]
    full = len(vectors) // columns  # tiles
    for chunk in chunks(full, max(1, rows_per_chunk(vectors) // columns)):
        rows = slice(chunk.start * columns, chunk.stop * columns)
        blocks = vectors[rows].view(-1, columns, vectors.shape[1])  # (tiles, columns, D)
        invert_norms(vectors[rows], out=inverse_norms[rows])
        torch.bmm(samples.expand(len(blocks), -1, -1), blocks.transpose(1, 2), out=tiles[chunk])
        tiles[chunk] *= inverse_norms[rows].view(-1, 1, columns)
    rows = slice(full * columns, len(vectors))  # the last, partial tile
    tiles = tiles[: _whole_blocks(-(-len(vectors) // columns))]
    tiles[full:] = -torch.inf
    if rows.start < rows.stop:
        invert_norms(vectors[rows], out=inverse_norms[rows])
        tiles[full, :, : rows.stop - rows.start] = (samples @ vectors[rows].T).mul_(inverse_norms[rows])
    return tiles


def _flat_index(values: Tensor, columns: Tensor) -> Tensor:
    """Index into the flattened values (tiles, B, columns of a tile) of the columns (B, K) of each row: (B, K)."""
    _, batch, width = values.shape
    row = torch.arange(batch, device=columns.device)[:, None]
    return (columns // width * batch + row) * width + columns % width


def _topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns (B, count) and values of the largest entries of each row, in any order: values (tiles, B, columns).

    For small counts in two rounds: the blocks with the largest maxima contain all of them.
    """
    tiles, _, columns = values.shape
    size = next((size for size in BLOCKS if tiles * columns >= 4 * count * size), 1)
    if size == 1:
        ranks, indices = _flat_rows(values).topk(count, sorted=False)
        return indices, ranks
    block = _block_maxima(values, size).topk(count, sorted=False).indices  # (B, count)
    ranks, best = _block_entries(values, block, size).topk(count, sorted=False)
    return block.gather(1, best % count) + tiles * columns // size * (best // count), ranks


def _above(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (B, K) and values of all entries above the threshold (B, 1) of their row, and of some others."""
    tiles, _, columns = values.shape
    size = BLOCKS[0]
    maxima = _block_maxima(values, size)
    rows = (maxima > threshold).nonzero()[:, 0]  # row of each block above; sum() is slower
    block = maxima.topk(int(rows.bincount(minlength=1).amax()), sorted=False).indices  # (B, blocks)
    first = tiles * columns // size * torch.arange(size, device=block.device)[:, None]
    return (block[:, None] + first).flatten(1), _block_entries(values, block, size)


def _flat_rows(values: Tensor) -> Tensor:
    """(tiles, B, columns) -> (B, tiles * columns)"""
    return values.permute(1, 0, 2).flatten(1)


def _block_maxima(values: Tensor, size: int) -> Tensor:
    """Maxima of blocks of `size` entries: (tiles, B, columns) -> (B, blocks). Block j: columns j, j + blocks, ..."""
    return _flat_rows(values.unflatten(0, (size, -1)).amax(0))


def _block_entries(values: Tensor, block: Tensor, size: int) -> Tensor:
    """The entries of blocks (B, count), the first entry of every block first: (B, size * count)."""
    step = values.numel() // size * torch.arange(size, device=block.device)[:, None]
    return values.take((_flat_index(values, block)[:, None] + step).flatten(1))


def invert_norms(vectors: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / norm of vectors (P, D): (P,)."""
    return torch.linalg.vector_norm(vectors, dim=1, out=out).clamp_min_(MIN_NORM).reciprocal_()


def chunk_elements(vectors: Tensor) -> int:
    """Similarities in memory at a time on this device."""
    return CHUNK_ELEMENTS if vectors.device.type == "cpu" else GPU_CHUNK_ELEMENTS


def rows_per_chunk(vectors: Tensor) -> int:
    """Rows of vectors (P, D) to process at a time on this device."""
    return max(1, (PROXY_ELEMENTS if vectors.device.type == "cpu" else GPU_PROXY_ELEMENTS) // vectors.shape[1])


def chunks(total: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]
