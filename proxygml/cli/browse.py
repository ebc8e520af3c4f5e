"""proxygml browse."""

import tempfile
import threading
import webbrowser
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from proxygml.cli.options import AS_TRAINED, Hardware
from proxygml.display import counted, messages, output, show_progress
from proxygml.training.recipe import Split


def browse(
    space: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|NPZ|INDEX")],
    hardware: Hardware = AS_TRAINED,
    split: Split = "all",
    data: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    open: bool = True,
) -> None:
    """Browse an embedding space on a local web page: neighbors, errors, confused classes, and a map with the proxies.

    `proxygml browse runs/small` embeds the run's images once, caches them in its folder and opens the page.
    `proxygml browse vectors.npz --data PHOTOS` shows your own features, with the images at its paths below that folder.
    Select or upload an image, and click a neighbor to continue from there; ? on the page lists the keys. Ctrl-C ends
    the server. No data leaves this machine.

    Args:
        space: Folder of a run, an .npz with `vectors` and `labels`, or folder or address of an index.
        hardware: What embeds images.
        split: Training images, test images or all images of a run; the proxies belong to the training classes.
        data: Folder of the images, if they have moved.
        host: Address to listen on; on any other than 127.0.0.1, everyone with the printed address (it contains a token)
            can see the images.
        port: Port to listen on; 0 takes a free one.
        open: Open the page in a browser.
    """
    from proxygml.optional import library

    for name in ("fastapi", "uvicorn"):
        library(name, extra="browse", user="browse")
    from proxygml.server.connections import address, listen, serve
    from proxygml.server.guards import LOOPBACK, new_token
    from proxygml.server.opening import open_space
    from proxygml.server.server import create_app

    # Listen first: embedding may take minutes.
    with listen(host, port) as listening, tempfile.TemporaryDirectory(prefix="proxygml-") as folder:
        with show_progress() as progress:
            opened = open_space(space, split=split, data=data, load=hardware.load, progress=progress)
        token = None if host in LOOPBACK else new_token()
        url = address(listening) + (f"/?token={token}" if token else "")

        def ready() -> None:
            classes = counted(len(opened.class_names), "class")
            kinds = f"({opened.no_errors})" if opened.no_errors else f"of {classes}"
            output.print(f"{counted(len(opened), 'vector')} {kinds}: {url} (Ctrl-C ends it)")
            if token:
                messages.print(f"warning: everyone with this address who can reach {host} can see these images")
            if open:
                target = url if token is None else redirection(url, Path(folder))
                threading.Thread(target=webbrowser.open, args=(target,), daemon=True).start()

        serve(create_app(opened, token=token, local=token is None), listening, ready)


def redirection(address: str, folder: Path) -> str:
    """The URL of a file in a private folder that leads to an address: every user of a machine sees command lines."""
    file = folder / "open.html"
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}">')
    return file.as_uri()
