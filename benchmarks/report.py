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
from proxygml.losses import at_once, nearest

PAGE = Path("docs/performance.md")
OURS, SPARSE, PARTS, DENSE = "proxygml", "proxygml, sparse gradient", "proxygml, in parts", "dense equations"
LIMITS = ("normalisation and products", "lengths and products")
TEXT = """# Performance

Written by `python -m benchmarks.report` from `results/bench`; do not edit. `make bench` measures again, but for Search
and The page, which have commands of their own; Evaluation and A training step it measures in small, and their commands
without `--quick` as here. Contenders take turns in one process; times are medians, and only their ratios are meant to
travel: the JSON files have the quartiles. A turn is up to {calls} calls, until these take {turn:.0f} ms; the first of
several does not count, and the others are as in a loop of their own.
{machine}

## The loss
Forward and backward of a batch. "Dense" is the loss as the paper writes it, with one-hot matrices that are made
anew in every call, full masks and a (CN)^2 regulariser; "peer" the fastest loss of pytorch-metric-learning that has as
many proxies of the same dimension, of ArcFace and Proxy-Anchor with one for each class, SoftTriple and sub-center
ArcFace with N (here {peers}); none of them has a regulariser like L^p. "Limit" is the proxies' normalisation and the
dense products that make scores and gradients, nothing else, which sums over few links go below; "stricter limit" the
same with the lengths of proxies alone, since no normalised copy of them need be made. Where there are two figures the
second is with `sparse_gradient=True`.

{loss}
Ratios are medians of those of each round, since the pace of a machine changes, and with a sparse gradient quotients of
two such. Of Cars with a batch of 32, half of the rounds have {of_limit_low:.2f} to {of_limit_high:.2f} of the limit's
time; of SOP, the peer takes {of_peer_low:.1f} to {of_peer_high:.1f} times as long.

Memory is the most that a step takes above parameters, by torch's account. The first call of a turn finds the caches
full of what another contender left: of Cars with a batch of 32 it takes {first:.2f} of the limit's first, the dense
equations {first_dense:.1f} times and the peer {first_peer:.2f} times as long.

![cost against the number of classes](../results/bench/classes.png)
![cost against the batch](../results/bench/batch.png)

### How
- **At once: fewer than {few_proxies:,} proxies, or with L^p up to {most_of_a_class} of a class,** whose similarities,
  with those of the sums of classes, fit into the memory of a part ([`at_once.py`](../proxygml/losses/at_once.py)). The
  number of operations counts here, more than their size: samples and sums of classes are multiplied together, three
  products in all, and the two matrices there are, of similarities and of their gradients, are whole. Cars with a batch
  of 32 takes {in_parts:.2f} times as long in parts. By hand, D = 512: with L^p at once is faster up to that memory;
  without it, and 2,000 proxies or a batch of 180, parts are.
- **Parts** from there on ([`subgraphs.py`](../proxygml/losses/subgraphs.py), with
  [`nearest.py`](../proxygml/losses/nearest.py)), for sparse gradients and for classes on several processes.
  Similarities are made {held:,} at a time and only the k largest of each row go on, so that no matrix of size B x CN
  exists beyond that, unless more than a tenth is linked. Later parts look only for what is nearer than the farthest
  link so far.
- **Tiles** there too: the product of 32 samples and all proxies is made of products with some
  hundred proxies each (`bmm`), sixteen at a time, while these are in the cache, beside their lengths.
- **Choosing in two rounds** there, where a row has at least 16 times as many entries as k: the maxima of blocks of 16,
  8 or 4 first, which have the same place in as many tiles, then the winning blocks. Exact: a block that holds one of
  the k largest has one of the k largest maxima.
- **Gradients over links.** Where a sample is linked to up to a tenth of the proxies, gradients are sums over links
  (`embedding_bag`), otherwise matrix products; at once, those of proxies are products always. Nothing normalised is
  kept: products are scaled by 1 / length instead.
- **The same memory in every step.** A gradient of a megabyte or more (but for sums over links with L^p, in parts) lies
  in memory that the loss lends, and again once `zero_grad()` has let go of it
  ([`rooms.py`](../proxygml/losses/rooms.py)): fresh memory is mapped page by page, which takes longer than filling it.
  The column MB counts it as torch's own.
- **The regulariser** goes through sums of classes and makes its gradient on the way forward, part by part. Its cost is
  that of three products of CN x C x D. `proxy_rows=1000` classifies a thousand proxies drawn at random instead of all:
  unbiased, and the only way for very many.
- **`sparse_gradient=True`** returns the gradient of linked proxies only, for `RowAdam`.

### What did not pay
Tried by hand, here or before the first line was written: `kthvalue` and CSR products; counting with `sum()` of a mask,
which takes 8 bytes for each entry; blocks of 32 and 64; class sums and row products by `einsum` instead of `bmm` and
`sum`; rows by `vectors[rows]` instead of `index_select`. Larger and smaller tiles are slower, and so are larger parts;
the transposed product gains less than turning its result costs. At once: `softmax` or `exp` for Eq. 10, where `exp2`
takes half the time; choosing in two rounds; taking off what lies along a proxy from its finished gradient; products in
batches or along parts of their inner axis, which gain a fiftieth with two threads and lose a twentieth with one;
inference mode, a fiftieth. oneDNN multiplies a tenth faster than MKL here, but torch offers it for float32 under a
private name only. What is left of a small step is the number of its operations, not its products.

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

        dense = both(entries[DENSE], "times") if DENSE in entries else f"would take {found['dense_gigabytes']:,.0f} GB"
        limits = [
            " / ".join(f"{one['times'] / entries[limit]['times']:.2f}" for one in (ours, sparse) if one is not None)
            for limit in LIMITS
        ]
        times = " / ".join(f"{one['ms']:.1f}" for one in (ours, sparse) if one is not None)
        memory = " / ".join(f"{one['mb']:.1f}" for one in (ours, sparse) if one is not None)
        rows.append((name, times, dense, both(peer, "times"), *limits, memory, both(peer, "mb")))
    columns = ("case (with sparse gradient)", "ms", "dense: times slower", "peer: times slower")
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
        held=nearest.HELD,
        few_proxies=at_once.FEW,
        most_of_a_class=at_once.MOST_OF_A_CLASS,
        turn=TURN,
        calls=CALLS,
        of_limit_low=1 / small[LIMITS[0]]["times_high"],
        of_limit_high=1 / small[LIMITS[0]]["times_low"],
        first=small[OURS]["first"] / small[LIMITS[0]]["first"],
        first_peer=small[best_peer(small)]["first"] / small[OURS]["first"],
        of_peer_low=sop[best_peer(sop)]["times_low"],
        of_peer_high=sop[best_peer(sop)]["times_high"],
        first_dense=small[DENSE]["first"] / small[OURS]["first"],
        in_parts=small[PARTS]["times"],
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
