"""A plan as one page that needs no network."""

import base64
import html

from keras_meshdist.planner import charts, words

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .2em .7em; border-bottom: 1px solid #ccc; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.no { color: #b00; } .yes { color: #070; } img { max-width: 100%; }
"""
# Meshes of which the collectives and the grid are shown.
_SHOWN = 3
_COLLECTIVES = 15


def page(report):
    """Returns a report as text of HTML, pictures included.

    Args:
        report: `PlanReport`.

    Returns:
        Str.

    Raises:
        ImportError: if matplotlib isn't installed.
    """
    known = [mesh for mesh in report.meshes if not mesh.error]
    parts = [f"<h1>Plan for {_text(report.topology)}</h1>", _summary(report)]
    parts += [f"<p>{_text(line)}</p>" for line in words.of_report(report)]
    if known:
        parts.append("<h2>Memory of a chip</h2>")
        parts.append(_image(charts.memory_chart(report), "memory by part"))
        parts.append("<h2>Estimated time of a step</h2>")
        parts.append(_image(charts.time_chart(report), "time by part"))
    for mesh in known[:_SHOWN]:
        parts.append(f"<h2>{_text(mesh.name)}</h2>")
        parts.append(_image(charts.grid_chart(mesh), "mesh on the chips"))
        parts += [f"<p>{_text(line)}</p>" for line in words.of_mesh(mesh)]
        parts += [_collectives(mesh), _feeds(mesh)]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>Plan for {_text(report.topology)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _summary(report):
    rows = []
    for mesh in report.meshes:
        if mesh.error:
            rows.append((_text(mesh.name), '<span class="no">error</span>'))
            continue
        fits = "yes" if mesh.fits else "no"
        rows.append(
            (
                _text(mesh.name),
                f'<span class="{fits}">{fits}</span>',
                *(
                    f"{mesh.bytes[part] / 2**30:.2f}"
                    for part in ("peak", "arguments", "temporaries")
                ),
                f"{mesh.flops / 1e12:.3g}",
                f"~{mesh.step_seconds * 1e3:.3g}",
                f"{mesh.parts['exposed_collectives'] * 1e3:.3g}",
                f"{mesh.tokens_per_second:.3g}",
                f"{mesh.utilisation:.0%}",
            )
        )
    return _table(
        (
            *("mesh", "fits", "GiB a chip", "arguments", "temporaries"),
            *("Tflop a chip", "ms a step", "waiting", "tokens/s", "of peak"),
        ),
        rows,
    )


def _collectives(mesh):
    rows = [
        (
            _text(c["kind"]),
            _text(", ".join(c["axes"])),
            f"{c['count']}",
            f"{c['bytes'] / 2**20:.3g}",
            _text(c["source"]),
        )
        for c in mesh.collectives[:_COLLECTIVES]
    ]
    left = len(mesh.collectives) - len(rows)
    more = f"<p>And {left} more, smaller ones.</p>" if left > 0 else ""
    heads = ("collective", "axes", "times", "MiB each", "layer")
    return _table(heads, rows) + more


def _feeds(mesh):
    rows = [
        (host, words.rows_in_words(rows)) for host, rows in mesh.feeds.items()
    ]
    return _table(("host", "rows"), rows)


def _table(heads, rows):
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _image(figure, alternative):
    data = base64.b64encode(charts.as_png(figure)).decode()
    return f'<img alt="{alternative}" src="data:image/png;base64,{data}">'


def _text(value):
    return html.escape(str(value))
