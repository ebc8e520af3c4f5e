"""The scores of a run as people read them: a line per epoch, and a table of the finished run."""

from datetime import timedelta

from proxygml.display import counted, output, show_scores
from proxygml.training.recipe import Recipe

PICTURES = {
    "retrieval.png": "queries and their nearest neighbors",
    "before_after.png": "nearest neighbors before and after training",
    "map.png": "map of the embeddings",
    "curves.png": "loss and scores over the epochs",
}
CHOICES = {  # of the epoch: keep_epoch, and which scores decided
    ("best", "held_out"): "best MAP@R on held-out classes",
    ("best", "test"): "best MAP@R on test classes",
    ("last", "held_out"): "the last that is better than before training on held-out classes",
}


def score_rows(recipe: Recipe, scores: dict) -> tuple[dict[str, dict], str]:
    """The scores of a run by the names that people read, and the name of the network before training."""
    baseline = "frozen backbone" if recipe.pretrained else "untrained network"
    trained = f"trained with {recipe.loss}" + (" *" if "remark" in scores else "")
    of = f" of {recipe.embedding_dim}"
    named = {
        "raw pixels": scores.get("pixels"),
        baseline: scores.get("untrained"),
        trained: scores.get("trained"),
        **{f"first {width}{of} dimensions": row for width, row in scores.get("nested", {}).items()},
        "the same, last epoch": scores.get("last_epoch"),
        "on held-out training classes": None if "trained" in scores else scores.get("held_out"),
    }
    if "gain" in scores:
        named[trained] = scores["trained"] | {"gain": scores["gain"]}
    return {name: row for name, row in named.items() if row is not None}, baseline


def describe_scores(recipe: Recipe, scores: dict) -> str:
    """What a run's scores are of."""
    scored = scores.get("trained") or scores["held_out"]
    shared = scores.get("shared_classes")
    seen = f", {shared} of them trained on" if shared else " never seen in training"
    before = " (before training)" if not scores["best_epoch"] else ""
    choice = CHOICES.get((recipe.keep_epoch, scores["epoch_chosen_by"]), "the last")
    epoch = f"epoch {scores['best_epoch']}{before} of {recipe.epochs} ({choice})"
    kept = epoch if recipe.epochs else "a head on the frozen network"
    return (
        f"{counted(scored['images'], 'image')} of {counted(scored['classes'], 'class')}{seen}; {kept}, "
        f"{scores['seconds']:.0f} s of training"
    )


def show_result(recipe: Recipe, scores: dict) -> None:
    """Print the scores of a run, which epoch they are of, and whether training helped."""
    rows, baseline = score_rows(recipe, scores)
    if rows:
        which = "test" if "shared_classes" in scores else "unseen"
        show_scores(rows, heading=f"on {which} classes, %", baseline=baseline)
        output.print(describe_scores(recipe, scores))
    if recipe.test and "trained" not in scores:
        output.print("no test score: --test-fraction 0 leaves no classes to test on")
    if "gain" in scores and scores["gain"][1] <= 0:
        output.print(_advice(recipe, scores, baseline))
    if "remark" in scores:
        output.print(f"* {scores['remark']}")


def _advice(recipe: Recipe, scores: dict, baseline: str) -> str:
    """Why no gain was measured, and what to try."""
    if scores["trained"]["lone_queries"] == scores["trained"]["images"]:
        return "Nothing to find: each test class has one image. Add images: two or more per class"
    n = recipe.recall_at[0]
    if scores["untrained"][f"recall@{n}"] == scores["trained"][f"recall@{n}"] == 1:
        return f"R@{n} has nothing to gain: that of the {baseline} is 100 % too. Test on more classes and images"
    slower = f"--learning-rate {recipe.learning_rate / 4:g}, fewer --epochs"
    longer = "more --epochs, --backbone efficientnet-lite0 --weights pretrained"
    whole = "to train the whole network (proxygml train photos; with --minutes, more of them)"
    advice = whole if not recipe.epochs else slower if recipe.pretrained else longer
    verdict = f"Training did not help: the {baseline} is no worse"
    if scores["gain"][0] > 0:
        verdict = f"The gain over the {baseline} may be chance: its interval includes 0"
    return f"{verdict}. Try {advice}, or more classes and images"


def describe_epoch(recipe: Recipe, entry: dict) -> str:
    """Loss, scores, speed and time left after an epoch, from its entry in the log."""
    left = timedelta(seconds=round(entry["seconds"] * (recipe.epochs - entry["epoch"])))
    speed = f"{entry['images_per_second']:.0f} images/s"
    return ", ".join([f"loss {entry['loss']:.3f}", *describe_choice(recipe, entry), speed, f"{left} left"])


def describe_choice(recipe: Recipe, entry: dict) -> list[str]:
    """The scores in an entry that choose the best epoch."""
    n = recipe.recall_at[0]
    return [
        f"{name.replace('_', '-')} R@{n} {100 * entry[name][f'recall@{n}']:.1f}, "
        f"MAP@R {100 * entry[name]['map_at_r']:.1f}"
        for name in ("held_out", "test")
        if name in entry
    ]
