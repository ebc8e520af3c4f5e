"""proxygml browse."""

import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.cli.display import drawn_progress, messages, output


def browse(
    space: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|NPZ|INDEX")],
    split: Literal["test", "train"] = "test",
    data: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    open: bool = True,
) -> None:
    """Look at an embedding space on a local page: neighbors, failures, confusions, and a map with the proxies.

    `proxygml browse runs/small` embeds the run's test images once, keeps them in its folder and opens the page.
    `proxygml browse vectors.npz --data PHOTOS` shows features of your own, with the images that its paths name below
    that folder. Pick an image or upload one, and walk on by clicking its neighbors; ? on the page lists its keys.
    Ctrl-C ends it. Nothing leaves this machine.

    Args:
        space: Folder of a run, an .npz with `vectors` and `labels`, or folder or address of an index.
        split: Of a run, its test images, or its training images, whose classes the proxies belong to.
        data: Folder of the images, where they are not where the run or the paths say.
        host: Address to listen on; with any other than 127.0.0.1 whoever has the printed address, which holds a
            token, sees the images.
        port: Port to listen on; 0 takes a free one.
        open: Open the page in a browser.
    """
    from proxygml.optional import library

    for name in ("fastapi", "uvicorn"):
        library(name, extra="browse", user="browse")
    from proxygml.server.guards import LOOPBACK, new_token
    from proxygml.server.opening import open_space
    from proxygml.server.server import create_app, listen, serve

    with listen(host, port) as listening:  # first: embedding may take minutes
        with drawn_progress() as progress:
            shown = open_space(space, split=split, data=data, progress=progress)
        name = f"[{host}]" if ":" in host else host
        token = None if host in LOOPBACK else new_token()
        address = f"http://{name}:{listening.getsockname()[1]}" + (f"/?token={token}" if token else "")

        def ready() -> None:
            output.print(
                f"{len(shown):,} vectors of {len(shown.class_names):,} classes: {address} (Ctrl-C ends it)",
                highlight=False,
                markup=False,
            )
            if token:
                messages.print(f"warning: whoever has this address and reaches {host} can see these images")
            if open:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        serve(create_app(shown, token=token), listening, ready)
