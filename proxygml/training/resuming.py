"""What may change when a run is resumed: its recipe, and what follows for the schedule."""

from dataclasses import asdict

from proxygml.display import Progress
from proxygml.training.loop import learning_rate_factor
from proxygml.training.recipe import Recipe

OF_EPOCHS = (  # settings of the epochs that are left
    *("learning_rate", "head_learning_rate", "proxy_learning_rate", "schedule", "decay", "decay_factor"),
    *("weight_decay", "adam_epsilon"),
)
CHANGEABLE = (
    *("epochs", *OF_EPOCHS, "tested_epochs", "test", "data", "skip_broken", "cache", "cache_gigabytes"),
    *("device", "precision", "workers", "devices", "nodes", "timeout"),
)


def check_changes(recipe: Recipe, checkpoint: dict, progress: Progress) -> None:
    """Raise an error if the recipe differs from the checkpoint's in more than CHANGEABLE; report what changes."""
    before, now, done = checkpoint.get("recipe", {}), asdict(recipe), len(checkpoint["log"])
    changed = [name for name in now if name in before and now[name] != before[name]]
    refused = [f"{name} from {before[name]} to {now[name]}" for name in changed if name not in CHANGEABLE]
    if refused:
        raise ValueError(
            f"--resume cannot change {', '.join(refused)}: change it back, or train a new run. "
            f"It can change {', '.join(CHANGEABLE)}"
        )
    if recipe.epochs < done:
        raise ValueError(f"expected at least as many epochs as are trained, {done}, got {recipe.epochs}")
    useless = [name for name in changed if name in OF_EPOCHS]
    if useless and recipe.epochs == done:
        raise ValueError(
            f"no epoch is left to train with {', '.join(useless)}: name more than {done} with --epochs as well"
        )
    for name in changed:
        progress(name, 0, 0, f"{now[name]}, was {before[name]}")
    if "epochs" in changed and recipe.epochs > done:
        curve = "follow a cosine over all of them" if recipe.schedule == "cosine" else "keep the steps of decay"
        rate = 100 * learning_rate_factor(recipe, done)
        progress("learning rates", 0, 0, f"{curve}: epoch {done + 1} starts at {rate:.3g} % of the initial rates")
