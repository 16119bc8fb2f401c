"""report.html: one self-contained page about a run, readable at any moment of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stretto.telemetry import sections
from stretto.telemetry.formatting import html_text
from stretto.telemetry.rundata import RunData, load_run
from stretto.telemetry.style import CSS

# The page shows text that a model wrote: should some of it ever pass as markup, it still cannot load or run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` from the files of ``run_dir`` and return its path; it replaces an older one atomically.

    Raises ValueError when the directory holds no run or a file is broken.
    """
    target = run_dir / "report.html"
    aside = target.with_name(target.name + ".tmp")
    aside.write_text(_page(load_run(run_dir)), encoding="utf-8")
    aside.replace(target)
    return target


def _page(run: RunData) -> str:
    body = "".join(
        section(run)
        for section in (
            sections.headline,
            sections.curves,
            sections.samples,
            sections.phases,
            sections.tokens,
            sections.configuration,
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(run.name)} · stretto</title><style>{CSS}</style></head>"
        f"<body><main><h1>{html_text(run.name)}</h1>{_subtitle(run)}{body}</main></body></html>\n"
    )


def _subtitle(run: RunData) -> str:
    """What was trained on what, as far as the configuration says."""
    keys = (("model", "path"), ("data", "source"), ("algorithm", "advantage"), ("trainer", "lr"))
    found = []
    for section, key in keys:
        table = run.config.get(section)
        if isinstance(table, Mapping) and key in table:
            found.append(f"{key.replace('path', 'model').replace('source', 'data')} {html_text(table[key])}")
    if "seed" in run.config:
        found.append(f"seed {html_text(run.config['seed'])}")
    return f'<p class="soft">{" · ".join(found)}</p>' if found else ""
