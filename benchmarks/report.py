"""Generates docs/performance.md with its plots, and docs/scaling.md, from results/.

python -m benchmarks.report
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks import scaling
from benchmarks.profiling import MAX_TURN_CALLS, MAX_TURN_MS, RESULTS, load
from proxygml.files import atomic_write
from proxygml.losses.proxygml import fused, topk
from proxygml.paper.tables import Table
from proxygml.retrieval import vector_index

PAGE = Path("docs/performance.md")
TEMPLATE = Path(__file__).with_name("performance.md")
OURS, SPARSE, DEFINITION = "proxygml", "proxygml, sparse gradient", "definition"
LIMITS = ("normalization and products", "norms and products")


def loss_table(cases: dict) -> Table:
    rows = []
    for name, case in cases.items():
        timings = case["contenders"]
        peer = timings[fastest_peer(timings)]
        ours = [timings[variant] for variant in (OURS, SPARSE) if variant in timings]
        cells = (
            [f"{variant['ms']:.1f}" for variant in ours],
            [f"{timings[DEFINITION]['ratio'] / variant['ratio']:.1f}" for variant in ours],
            [f"{peer['ratio'] / variant['ratio']:.1f}" for variant in ours],
            *([f"{variant['ratio'] / timings[limit]['ratio']:.2f}" for variant in ours] for limit in LIMITS),
            [f"{variant['mb']:.1f}" for variant in ours],
            [f"{peer['mb'] / variant['mb']:.1f}" for variant in ours],
        )
        rows.append((name, *map("/".join, cells)))
    columns = ("case", "ms", "definition", "peer", "limit", "strict", "MB", "peer's MB, relative")
    return Table(columns, tuple(rows))


def fastest_peer(timings: dict) -> str:
    return min((name for name in timings if "PML" in name), key=lambda name: timings[name]["ratio"])


def optimizer_table(cases: dict) -> Table:
    names = list(next(iter(cases.values()))["contenders"])
    rows = []
    for name, case in cases.items():
        timings = [case["contenders"][contender] for contender in names]
        ratios = [f"{timing['ratio']:.1f}" for timing in timings[1:]]
        memory = "/".join(f"{timing['mb']:,.0f}" for timing in timings)
        rows.append((f"{name}, {case['touched']:,} rows", f"{timings[0]['ms']:.1f}", *ratios, memory))
    return Table(("case", f"{names[0]}, ms", *names[1:], "MB of each"), tuple(rows))


def evaluation_table(contenders: dict, differences: dict) -> Table:
    ours = next(iter(contenders.values()))["ms"]
    rows = [
        (
            name,
            f"{timing['ms'] / 1000:.1f}",
            f"{timing['ms'] / ours:.2f}",
            f"{timing['mb']:,}",
            f"{differences[name]:.1f}" if name in differences else "-",
        )
        for name, timing in contenders.items()
    ]
    return Table(("", "s", "relative", "MB", "difference"), tuple(rows))


def search_table(cases: dict, queries: int) -> Table:
    rows = []
    for name, kinds in cases.items():
        for kind, case in kinds.items():
            seconds = [f"{s:.2f}" for s in (case["queries_s"], case["query_ms"] / 1000, case["opening_s"])]
            build = f"{case['adding_s'] + case['building_s']:,.0f}"
            size = f"{case['database_mb'] + case['faiss_mb']:,}"
            rows.append((f"{kind}, {name}", f"{100 * case['recall']:.1f}", *seconds, build, size))
    columns = ("", "recall, %", f"{queries:,} queries, s", "one query, s", "first, s", "build, s", "MB on disk")
    return Table(columns, tuple(rows))


def training_table(cases: dict) -> Table:
    rows = []
    for name, case in cases.items():
        parts = case["parts_ms"].values()
        fractions = [f"{part / sum(parts):.1%}" for part in parts]
        rows.append((name, *fractions, f"{case['evaluation_fraction']:.1%}" if "evaluation_fraction" in case else "-"))
    return Table(("", *next(iter(cases.values()))["parts_ms"], "evaluation"), tuple(rows))


def startup_table(seconds: dict, ratios: dict) -> Table:
    rows = [(f"`{name}`", f"{seconds[name]:.1f}", f"{ratios[name]:.2f}") for name in seconds]
    return Table(("", "CPU s", "relative"), tuple(rows))


def plot(cases: dict, key: str, label: str, path: Path) -> None:
    """Plot time and memory of every contender over one dimension of the problem."""
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    units = {"ms": "ms per step", "mb": "MB above parameters"}
    for axis, (measure, unit) in zip(figure.subplots(1, 2), units.items(), strict=True):
        for name in dict.fromkeys(name for case in cases.values() for name in case["contenders"]):
            points = [
                (case["case"][key], case["contenders"][name][measure])
                for case in cases.values()
                if name in case["contenders"]
            ]
            axis.loglog(*zip(*points, strict=True), marker=".", label=name, linewidth=2.5 if OURS in name else 1.2)
        axis.set(xlabel=label, ylabel=unit)
    figure.axes[0].legend(fontsize=7)
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png", dpi=110, metadata={"Software": None})


def page() -> str:
    """The text of docs/performance.md."""
    names = ("loss", "optimizer", "evaluation", "training", "search", "page", "startup")
    loss, optimizer, evaluation, training, search, browser, startup = (load(name) for name in names)
    cars, sop = (loss["cases"][name]["contenders"] for name in ("Cars, batch 32", "SOP, batch 32"))
    peers = sorted({fastest_peer(case["contenders"]).removesuffix(" (PML)") for case in loss["cases"].values()})
    text = TEMPLATE.read_text().format(
        calls=MAX_TURN_CALLS,
        turn=MAX_TURN_MS,
        machine=loss["made_by"]["machine"],
        threads=loss["threads"],
        torch=loss["made_by"]["torch"],
        peers=", ".join(peers),
        loss=loss_table(loss["cases"]).to_markdown(),
        limit_low=1 / cars[LIMITS[0]]["ratio_high"],
        limit_high=1 / cars[LIMITS[0]]["ratio_low"],
        peer_low=sop[fastest_peer(sop)]["ratio_low"],
        peer_high=sop[fastest_peer(sop)]["ratio_high"],
        max_proxies=fused.MAX_PROXIES,
        chunk_elements=topk.CHUNK_ELEMENTS,
        optimizer=optimizer_table(optimizer["cases"]).to_markdown(),
        images=evaluation["images"],
        classes=evaluation["classes"],
        dimension=evaluation["dimension"],
        evaluation=evaluation_table(evaluation["contenders"], evaluation["query_differences"]).to_markdown(),
        vectors=search["vectors"],
        width=search["width"],
        search_machine=search["made_by"]["machine"],
        search_threads=search["threads"],
        count=search["count"],
        search=search_table(search["cases"], search["queries"]).to_markdown(),
        block=vector_index.BLAS_BLOCK,
        points=browser["points"],
        nearest=browser["nearest_ms"],
        failures=browser["failures_s"],
        screens=", ".join(browser["screens"]),
        frames=min(screen["frames_per_second"] for screen in browser["screens"].values()),
        gap=max(screen["gap_ms_95"] for screen in browser["screens"].values()),
        training=training_table(training["cases"]).to_markdown(),
        startup=startup_table(startup["cpu_s"], startup["ratio"]).to_markdown(),
    )
    return text.rstrip("\n") + "\n"


def main() -> None:
    loss = load("loss")
    plot(loss["by_classes"], "classes", "classes, D = 128, batch 32", RESULTS / "classes.png")
    plot(loss["by_batch"], "batch", "batch, 11,318 classes, D = 512", RESULTS / "batch.png")
    for path, text in ((PAGE, page()), (scaling.PAGE, scaling.page())):
        with atomic_write(path) as draft:
            draft.write_text(text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
