"""A run as one self-contained HTML page."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from fedjax_tp.io.folder import write_text

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; height: auto; }
code, pre { font-size: .85rem; background: #f5f5f5; }
pre { padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
.notice { background: #fff6dd; padding: .5rem .8rem; border-left: 4px solid #e69f00; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for notice in notices %}<p class="notice">{{ notice }}</p>
{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>
<div class="scroll"><table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
{% for picture in pictures %}<h2>{{ picture.caption }}</h2>
<img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
{% endfor %}
<h2>Command</h2>
<pre>{{ command }}</pre>
<h2>Settings</h2>
<div class="scroll"><table>
{% for name, value in settings.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table></div>
</body>
</html>
"""


def bold(text: str) -> Markup:
    """The text in bold, for a cell of a table."""
    return Markup("<b>{}</b>").format(text)


class Table(NamedTuple):
    """A table of the report; cells are shown as they are."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


def write_report(
    path: Path,
    *,
    title: str,
    summary: str,
    tables: Sequence[Table],
    pictures: Mapping[str, Path],
    notices: Sequence[str],
    command: str,
    settings: Mapping[str, Any],
) -> None:
    """Writes the page; `pictures` maps captions to PNG files, which it embeds."""
    embedded = [
        {"caption": caption, "data": base64.b64encode(png.read_bytes()).decode()}
        for caption, png in pictures.items()
    ]
    page = Environment(autoescape=True).from_string(_TEMPLATE)
    content = page.render(
        title=title,
        summary=summary,
        tables=tables,
        pictures=embedded,
        notices=notices,
        command=command,
        settings=settings,
    )
    write_text(path, content)
