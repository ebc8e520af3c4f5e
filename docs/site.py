"""MkDocs hook: the site keeps the paths of the repository, so links between documents work in both."""

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Documents and the files they show or link to.
PATTERNS = (
    *("*.md", "LICENSE", "CITATION.cff", "docs/*.md", "docs/pictures/*"),
    *("examples/*", "proxygml/**/*.py", "tests/**/*.py", "results/**/*.png", "results/**/*.json", "results/**/*.md"),
    *("results/ablation/*.md", "results/methods/*.md", "results/faults.md", "results/fuzz.md"),
)

log = logging.getLogger("mkdocs.hooks.site")  # in a strict build, a warning is an error


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace docs/ by all documents, under their paths in the repository; README.md is the home page."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of pages that load remote resources: they cannot be read offline."""
    for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", output):
        log.warning("%s is not readable offline: %s", page.file.src_uri, tag)
    return output
