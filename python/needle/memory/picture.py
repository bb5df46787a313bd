"""The memory of a traced region over time, as a page that needs no network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from ..backend_ndarray.host_memory import FREED, MADE, RETAGGED
from ..files import write_atomically
from .trace import Holder, trace
from .units import readable

# From the bottom up, what stays longest first. The colours differ also to eyes that see fewer. source: Okabe & Ito 2008.
COLOURS = {
    "parameter": "#0072B2", "optimizer state": "#56B4E9", "data": "#009E73", "gradient": "#D55E00", "activation": "#E69F00",
    "workspace": "#CC79A7",
}  # fmt: skip
_GREY = "#767676"  # as far from white as from black, so that one page serves light and dark
_CLEAR = "rgba(0,0,0,0)"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>%s</title>
<style>html { color-scheme: light dark } body { margin: 0; height: 100vh }</style></head><body>%s</body></html>
"""
_MIB = float(1 << 20)


def picture(traced: trace, path: str | os.PathLike) -> Path:
    """Writes an HTML page to ``path`` that shows ``traced``: bytes by category after each event, stacked; what each event was (op,
    module, bytes, line) under the pointer; the peak and the trace's marks. Needs plotly.

    raises: ModuleNotFoundError without plotly; OSError where it cannot be written.
    """
    from plotly import graph_objects as go

    x = list(range(len(traced.live)))
    figure = go.Figure()
    for name, mib in _over_time(traced).items():
        figure.add_scatter(
            x=x, y=mib, name=name, stackgroup="live", line={"width": 0, "shape": "hv"}, fillcolor=COLOURS[name],
            hovertemplate="%{y:,.2f} MiB",
        )  # fmt: skip
    figure.add_scatter(
        x=x, y=[n / _MIB for n in traced.live], name="all", line={"color": _GREY, "width": 1, "shape": "hv"},
        customdata=["before", *(_described(kind, h) for kind, h in traced.events)], hovertemplate="%{y:,.2f} MiB<br>%{customdata}",
    )  # fmt: skip
    top, what = traced.peak_index, escape(traced.peak_site.what, quote=False)
    figure.add_annotation(
        x=top, y=traced.live[top] / _MIB, text=f"peak {readable(traced.peak_bytes)}<br>{what}", arrowhead=2, arrowcolor=_GREY
    )
    for index, text in traced.mark_positions():
        figure.add_vline(
            x=index, line={"dash": "dot", "color": _GREY}, annotation_text=escape(text, quote=False), annotation_position="top"
        )
    faint = {"gridcolor": "rgba(118,118,118,0.3)", "zerolinecolor": _GREY, "linecolor": _GREY}
    title = f"memory of {traced.device.name}: live bytes by category"
    figure.update_layout(
        title=title,
        xaxis={"title": "allocations and releases, in order", **faint},
        yaxis={"title": "MiB", **faint},
        hovermode="x unified",
        template="plotly_white",
        paper_bgcolor=_CLEAR,
        plot_bgcolor=_CLEAR,
        modebar_bgcolor=_CLEAR,
        font_color=_GREY,
        hoverlabel={"bgcolor": "white", "font_color": "black"},
        legend={"orientation": "h", "y": -0.2},
    )
    target, page = Path(path), (_PAGE % (escape(title), figure.to_html(include_plotlyjs=True, full_html=False))).encode()
    if target.exists() and not target.is_file():  # a pipe, a terminal
        target.write_bytes(page)
    else:
        with write_atomically(target) as file:
            file.write(page)
    return target


def _over_time(traced: trace) -> dict[str, list[float]]:
    """MiB live before the first event and after each, of the categories that there are."""
    names = [name for name in COLOURS if any(h.category == name for h in [*traced.first, *(h for _, h in traced.events)])]
    now = {name: sum(h.nbytes for h in traced.first if h.category == name) for name in names}
    series = {name: [now[name] / _MIB] for name in names}
    tags = {h.serial: h.category for h in traced.first}
    for kind, h in traced.events:
        if h.serial in tags:
            now[tags.pop(h.serial)] -= h.nbytes
        if kind != FREED:
            tags[h.serial] = h.category
            now[h.category] += h.nbytes
        for name in names:
            series[name].append(now[name] / _MIB)
    return series


def _described(kind: int, h: Holder) -> str:
    """An event, in HTML."""
    word = {MADE: "+", RETAGGED: "becomes", FREED: "-"}[kind]
    shown = h.site.forward or h.site
    lines = (
        f"{word} {readable(h.nbytes)} {h.category}",
        f"{h.site.what}{f' of {h.module}' if h.module else ''}",
        f"{shown.place} {shown.code[:90]}",
    )
    return "<br>".join(escape(line, quote=False) for line in lines)
