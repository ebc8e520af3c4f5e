"""Writes docs/performance.md with its plots, and docs/scaling.md, from results/.

python -m benchmarks.report
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks import scaling
from benchmarks.measuring import CALLS, RESULTS, TURN, load
from proxygml.evaluation import clustering
from proxygml.experiments.tables import Table
from proxygml.files import written_whole
from proxygml.index import finder
from proxygml.losses.proxygml import fused, topk

PAGE = Path("docs/performance.md")
OURS, SPARSE, CHUNKED, DEFINITION = "proxygml", "proxygml, sparse gradient", "proxygml, chunked", "definition"
LIMITS = ("normalization and products", "norms and products")
TEXT = """# Performance

Written by `python -m benchmarks.report` from `results/bench`; do not edit. `make bench` measures again, except Search
and The page, which have commands of their own; it runs Evaluation and A training step in their `--quick` form.
Contenders take turns in one process. Times are medians; trust their ratios, not the milliseconds. A turn is up to
{calls} calls or
{turn:.0f} ms; the first call of a turn does not count.
{machine}

## The loss
Forward and backward of a batch.

- "definition" is [`proxygml_loss`](../proxygml/losses/proxygml/definition.py) under autograd.
- "peer" is the fastest loss of pytorch-metric-learning with as many proxies of the same dimension (here {peers}). None
  has a regularizer like L^p.
- "limit" is the normalization of the proxies and the dense matrix products of forward and backward, nothing else. Sums
  over few links go below it. "stricter limit" takes only the norms of the proxies instead of normalizing them.
- The second figure in a cell is with `sparse_gradient=True`.

{loss}
Each ratio is the median over rounds of the ratio within the round, because the speed of a machine changes. For Cars
with a batch of 32, half of the rounds lie between {of_limit_low:.2f} and {of_limit_high:.2f} times the limit; for SOP
the peer takes {of_peer_low:.1f} to {of_peer_high:.1f} times as long. Memory is the peak above parameters, as torch
counts it. With cold caches (the first call of a turn), Cars with a batch of 32 takes {first:.2f} times the limit, the
definition
{first_definition:.1f} times and the peer {first_peer:.2f} times as long as ours.

![cost against the number of classes](../results/bench/classes.png)
![cost against the batch](../results/bench/batch.png)

### How
- **Fused** ([`fused.py`](../proxygml/losses/proxygml/fused.py)) serves fewer than {few_proxies:,} proxies, or with L^p
  up to {most_of_a_class} per class, if their similarities fit into one chunk. Here the number of operations matters
  more than their size: samples and class sums are multiplied together, three products in all. Cars with a batch of 32
  takes {chunked:.2f} times as long in chunks.
- **Chunked** ([`chunked.py`](../proxygml/losses/proxygml/chunked.py),
  [`topk.py`](../proxygml/losses/proxygml/topk.py)) serves everything else, sparse gradients and sharded classes. It
  computes {held:,} similarities at a time and keeps the k largest of each row, so no (B, CN) matrix exists unless more
  than a tenth is linked.
- **Tiles.** The product of 32 samples and all proxies is a `bmm` with some hundred proxies each, sixteen at a time,
  while these are in the cache together with their norms.
- **Block-wise top-k** where a row has at least 16 times as many entries as k: first the maxima of blocks of 16, 8 or 4,
  then the winning blocks. It is exact: a block with one of the k largest entries has one of the k largest maxima.
- **Gradients over links.** If a sample is linked to at most a tenth of the proxies, gradients are sums over links
  (`embedding_bag`), otherwise matrix products. Products are scaled by 1 / norm instead of normalizing the proxies.
- **Reused memory** ([`buffers.py`](../proxygml/losses/proxygml/buffers.py)). Gradients of a megabyte or more lie in
  memory that is used again after `zero_grad()`; mapping fresh memory takes longer than filling it.
- **The regularizer** works on class sums and computes its gradient in the forward pass. It costs three products of
  CN x C x D. `proxy_rows=1000` classifies a random thousand of the proxies: unbiased, and the only way for very many.
- **`sparse_gradient=True`** returns the gradient of linked proxies only, for `RowAdam`.

### What did not pay
Tried by hand: `kthvalue`; CSR products; counting with `sum()` of a mask; blocks of 32 and 64; `einsum` for class sums;
`vectors[rows]` instead of `index_select`; other tile and chunk sizes; the transposed product. In fused.py: `softmax`
or `exp` for Eq. 10 (`exp2` takes half the time); block-wise top-k; products in batches; inference mode. oneDNN
multiplies a tenth faster than MKL here, but torch offers it for float32 only under a private name.

## The optimizer
A step on the proxies alone, and the memory it takes above weights and moments. `RowAdam` equals Adam where every row is
touched in every step; otherwise untouched rows keep weights and moments: no decay, no momentum that goes on.

{optimizer}
Training uses `Adam(fused=True)`, and `RowAdam` with `--sparse-gradient`.

## Evaluation
Every recall, R-precision and MAP@R of {images:,} made-up vectors of {dimension} numbers in {classes:,} classes (SOP has
60,502 in 11,316), beside the recalls of faiss's exact search and what pytorch-metric-learning computes. Memory is above
the embeddings, each contender in a process of its own; "queries apart" is the largest difference of a score, in
queries: the others compare in float32, ours falls back to float64 wherever float32 cannot tell which is nearer.

{evaluation}
How: nothing is sorted. The rank of a positive is the number of items before it, so products are made block by block and
counted at once ([`counting.py`](../proxygml/evaluation/counting.py)), and where images are searched among themselves
each product serves both. With so many positives that counting would take more memory or more doubtful comparisons
than search, [`search.py`](../proxygml/evaluation/search.py) finds the nearest in float64 instead. NMI, which is not in
the table, takes k-means of faiss: up to {many} clusters the tightest of {starts} k-means++ starts, beyond that one.

## Search
An index of {search_vectors:,} vectors of {search_width} numbers ({search_machine}):
{search_queries:,} queries in one call, one query alone, and the time until a new process has its first answer. Recall
is the share of the {search_count} truly nearest that are found. Random vectors are as hard to search as any; those of
a trained network lie in groups. [search.md](search.md) says which kind is chosen when.

{search}
How: a database holds vectors, paths and classes, faiss finds candidates, and those are compared again by their own
vectors ([`folder.py`](../proxygml/index/folder.py)): of ivf-pq, which keeps a byte for four numbers, ten for each item
that is asked for. The exact search compares {compared:,} vectors at a time, where faiss by itself takes 1,024: tried by
hand, two threads then mostly waited for each other.

## The page
The map of `proxygml browse` with {page_points:,} points in a headless Chromium without a graphics card, dragged in
circles (`python -m benchmarks.page`). There the nearest of an image come after {page_nearest} ms, and the failures and
confusions of all images after {page_failures} s.

{page}
## A training step
Where the time of a step goes, and what share of an epoch the scoring of held-out classes takes.

{training}"""


def loss_table(cases: dict) -> Table:
    rows = []
    for name, found in cases.items():
        entries = found["contenders"]
        ours, sparse = entries[OURS], entries.get(SPARSE)
        peer = entries[best_peer(entries)]

        def both(contender: dict, key: str, ours: dict = ours, sparse: dict | None = sparse) -> str:
            ratios = [contender[key] / one[key] for one in (ours, sparse) if one is not None]
            return " / ".join(f"{ratio:.1f}" for ratio in ratios)

        limits = [
            " / ".join(f"{one['times'] / entries[limit]['times']:.2f}" for one in (ours, sparse) if one is not None)
            for limit in LIMITS
        ]
        times = " / ".join(f"{one['ms']:.1f}" for one in (ours, sparse) if one is not None)
        memory = " / ".join(f"{one['mb']:.1f}" for one in (ours, sparse) if one is not None)
        rows.append(
            (name, times, both(entries[DEFINITION], "times"), both(peer, "times"), *limits, memory, both(peer, "mb"))
        )
    columns = ("case (with sparse gradient)", "ms", "definition: times slower", "peer: times slower")
    return Table((*columns, "times the limit", "times the stricter", "MB", "peer: times more"), tuple(rows))


def best_peer(entries: dict) -> str:
    return min((name for name in entries if "PML" in name), key=lambda name: entries[name]["times"])


def optimizer_table(cases: dict) -> Table:
    names = list(next(iter(cases.values()))["contenders"])
    rows = []
    for case, found in cases.items():
        entries = [found["contenders"][name] for name in names]
        ratios = [f"{entry['times']:.1f}" for entry in entries[1:]]
        memory = " / ".join(f"{entry['mb']:,.0f}" for entry in entries)
        rows.append((f"{case}, {found['touched']:,} rows touched", f"{entries[0]['ms']:.1f}", *ratios, memory))
    columns = ("case", f"{names[0]}, ms", *(f"{name}: times its time" for name in names[1:]), "MB, of each")
    return Table(columns, tuple(rows))


def evaluation_table(contenders: dict, apart: dict) -> Table:
    ours = next(iter(contenders.values()))["ms"]
    rows = []
    for name, found in contenders.items():
        differs = f"{apart[name]:.1f}" if name in apart else "-"
        rows.append((name, f"{found['ms'] / 1000:.1f}", f"{found['ms'] / ours:.2f}", f"{found['mb']:,}", differs))
    return Table(("", "s", "times ours", "MB", "queries apart"), tuple(rows))


def search_table(cases: dict) -> Table:
    rows = []
    for name, kinds in cases.items():
        for kind, found in kinds.items():
            recall, size = f"{100 * found['recall']:.1f} %", found["database_mb"] + found["faiss_mb"]
            seconds = (found["queries_s"], found["query_ms"] / 1000, found["opening_s"])
            built = f"{found['adding_s'] + found['building_s']:,.0f}"
            rows.append((f"{kind}, {name}", recall, *(f"{value:.2f}" for value in seconds), built, f"{size:,}"))
    columns = ("", "recall", "1,000 queries, s", "one query, s", "first answer, s", "building, s", "MB on disk")
    return Table(columns, tuple(rows))


def page_table(screens: dict) -> Table:
    columns = ("screen", "frames a second", "from frame to frame, ms", "95 % of them, ms", "drawing the points, ms")
    names = ("frames_a_second", "gap_ms", "gap_ms_95", "points_ms")
    return Table(columns, tuple((screen, *(str(found[name]) for name in names)) for screen, found in screens.items()))


def training_text(cases: dict) -> str:
    columns = ("", *next(iter(cases.values()))["parts_ms"], "scoring, of an epoch")
    rows = []
    for name, found in cases.items():
        total = sum(found["parts_ms"].values())
        shares = [f"{100 * part / total:.1f} %" for part in found["parts_ms"].values()]
        scoring = f"{100 * found['scoring_share']:.1f} %" if "scoring_share" in found else "-"
        rows.append((name, *shares, scoring))
    return Table(columns, tuple(rows)).to_markdown()


def draw(found: dict, key: str, label: str, path: Path) -> None:
    """Time and memory of every contender against one axis of the problem."""
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, (measure, unit) in zip(
        figure.subplots(1, 2), {"ms": "ms a step", "mb": "MB above parameters"}.items(), strict=True
    ):
        names = dict.fromkeys(name for case in found.values() for name in case["contenders"])
        for name in names:
            points = [
                (case["case"][key], case["contenders"][name][measure])
                for case in found.values()
                if name in case["contenders"]
            ]
            axis.loglog(*zip(*points, strict=True), marker=".", label=name, linewidth=2.5 if OURS in name else 1.2)
        axis.set(xlabel=label, ylabel=unit)
    figure.axes[0].legend(fontsize=7)
    with written_whole(path) as draft:
        figure.savefig(draft, format="png", dpi=110, metadata={"Software": None})


def page() -> str:
    """The whole of docs/performance.md."""
    names = ("loss", "optimizer", "evaluation", "training", "search", "page")
    loss, optimizer, evaluation, training, search, browsed = (load(name) for name in names)
    peers = sorted({best_peer(case["contenders"]).removesuffix(" (PML)") for case in loss["cases"].values()})
    made_by = loss["made_by"]
    small, sop = (loss["cases"][name]["contenders"] for name in ("Cars, batch 32", "SOP, batch 32"))
    return TEXT.format(
        machine=f"Here: {made_by['machine']}, {loss['threads']} threads, torch {made_by['torch']}.",
        peers=", ".join(peers),
        held=topk.CHUNK_ELEMENTS,
        few_proxies=fused.MAX_PROXIES,
        most_of_a_class=fused.MAX_PER_CLASS,
        turn=TURN,
        calls=CALLS,
        of_limit_low=1 / small[LIMITS[0]]["times_high"],
        of_limit_high=1 / small[LIMITS[0]]["times_low"],
        first=small[OURS]["first"] / small[LIMITS[0]]["first"],
        first_peer=small[best_peer(small)]["first"] / small[OURS]["first"],
        of_peer_low=sop[best_peer(sop)]["times_low"],
        of_peer_high=sop[best_peer(sop)]["times_high"],
        first_definition=small[DEFINITION]["first"] / small[OURS]["first"],
        chunked=small[CHUNKED]["times"],
        loss=loss_table(loss["cases"]).to_markdown(),
        optimizer=optimizer_table(optimizer["cases"]).to_markdown(),
        images=evaluation["images"],
        classes=evaluation["classes"],
        dimension=evaluation["dimension"],
        evaluation=evaluation_table(evaluation["contenders"], evaluation["queries_apart"]).to_markdown(),
        many=clustering.MANY_CLUSTERS,
        starts=clustering.STARTS,
        search_vectors=search["vectors"],
        search_width=search["width"],
        search_machine=f"{search['made_by']['machine']}, {search['threads']} threads",
        search_queries=search["queries"],
        search_count=search["count"],
        search=search_table(search["cases"]).to_markdown(),
        compared=finder.COMPARED,
        page_points=browsed["points"],
        page_nearest=browsed["nearest_ms"],
        page_failures=browsed["failures_s"],
        page=page_table(browsed["screens"]).to_markdown(),
        training=training_text(training["cases"]),
    )


def main() -> None:
    loss = load("loss")
    draw(loss["by_classes"], "classes", "classes, D = 128, batch 32", RESULTS / "classes.png")
    draw(loss["by_batch"], "batch", "batch, 11,318 classes, D = 512", RESULTS / "batch.png")
    for path, text in ((PAGE, page()), (scaling.PAGE, scaling.page())):
        with written_whole(path) as draft:
            draft.write_text(text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
