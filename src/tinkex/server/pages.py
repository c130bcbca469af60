"""The service's HTML pages: its state, and the API reference.

Pure functions from values to HTML. A page loads no scripts, fonts or other files, because many local services run
without network access. Every value from outside is escaped where it is inserted.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

__all__ = ["docs_page", "front_page"]

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--line:#dfe4ea;--page:#f6f7f9;--card:#fff;--code:#f0f2f5;
--accent:#0b62c4;--good:#1a7f45;--get:#0b62c4;--post:#1a7f45;--put:#8f5a00;--delete:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#9aa6b4;--line:#2c343f;--page:#12161c;--card:#1a2029;
--code:#222a35;--accent:#6cb2ff;--good:#57cf8c;--get:#6cb2ff;--post:#57cf8c;--put:#e5b04f;--delete:#ff8a80}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem}
h3{font-size:1rem;margin:1.25rem 0 .5rem}
h4{font-size:.78rem;margin:1.1rem 0 .4rem;color:var(--soft);text-transform:uppercase;letter-spacing:.05em}
p{margin:.5rem 0}
a{color:var(--accent);text-decoration-thickness:1px;text-underline-offset:2px}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.875em}
code{background:var(--code);border-radius:4px;padding:.1em .3em;overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:1rem;overflow-x:auto;line-height:1.5}
pre code{background:none;padding:0;font-size:1em;overflow-wrap:normal}
table{border-collapse:separate;border-spacing:0;width:100%;background:var(--card);border:1px solid var(--line);border-radius:8px}
th,td{text-align:left;vertical-align:top;padding:.45rem .75rem;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:.8rem;font-weight:600;color:var(--soft)}
td p{margin:0}
.scroll{overflow-x:auto}
.soft{color:var(--soft)}
footer{margin-top:3rem;color:var(--soft);font-size:.875rem}
"""

_FRONT_STYLE: Final = """
.state{display:inline-flex;align-items:center;gap:.5rem;color:var(--good);font-weight:600;font-size:.9rem;
margin-bottom:.75rem}
.state::before{content:"";width:.6rem;height:.6rem;border-radius:50%;background:var(--good)}
.counts{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.75rem;margin:1.75rem 0 0;padding:0}
.counts div{display:flex;flex-direction:column-reverse;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:.75rem 1rem}
.counts dt{color:var(--soft);font-size:.85rem}
.counts dd{margin:0;font-size:1.45rem;font-weight:600;font-variant-numeric:tabular-nums}
.models td:last-child{white-space:nowrap}
.go{display:flex;flex-wrap:wrap;gap:.75rem;margin:1.25rem 0 0}
.go a{border:1px solid var(--line);background:var(--card);border-radius:8px;padding:.5rem 1rem;text-decoration:none;
font-weight:600}
.go a:hover,.go a:focus-visible{border-color:var(--accent)}
"""

_DOCS_STYLE: Final = """
.columns{display:grid;grid-template-columns:16rem minmax(0,1fr)}
.columns main{max-width:64rem;margin:0;padding-left:2.5rem;padding-right:2.5rem}
nav{position:sticky;top:0;height:100vh;overflow-y:auto;padding:1.5rem 1.25rem;border-right:1px solid var(--line);
background:var(--card);font-size:.85rem}
nav ul{list-style:none;margin:.2rem 0 1rem;padding:0}
nav li a{display:block;padding:.1rem 0;color:var(--soft);text-decoration:none;overflow-wrap:anywhere}
nav li a:hover,nav li a:focus-visible{color:var(--accent)}
nav>a{font-weight:600;color:var(--ink);text-decoration:none}
@media(max-width:60rem){.columns{display:block}nav{display:none}.columns main{padding-left:1rem;padding-right:1rem}}
.call{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:.5rem 0}
.call summary{display:flex;flex-wrap:wrap;align-items:baseline;gap:.25rem .75rem;padding:.6rem .9rem;cursor:pointer}
.call summary::after{content:"+";margin-left:auto;color:var(--soft)}
.call[open] summary::after{content:"−"}
.call summary:hover code,.call[open] summary code{color:var(--accent)}
.call[open] summary{border-bottom:1px solid var(--line)}
.call summary code{background:none;padding:0}
.method{font:600 .75rem ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;width:3.6rem;color:var(--ink)}
.get{color:var(--get)}.post{color:var(--post)}.put{color:var(--put)}.delete{color:var(--delete)}
.inside{padding:.25rem 1rem 1.1rem;scroll-margin-top:4rem}
.must{color:var(--delete);font-size:.78rem;white-space:nowrap}
.schema{scroll-margin-top:1rem;margin-top:1.75rem}
.schema h3{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.schema:target h3{color:var(--accent)}
.fields td:first-child{width:30%}.fields td:nth-child(2){width:35%}
.answers td:first-child{width:4.5rem}.answers td:nth-child(3){width:45%}
"""


def _page(title: str, style: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # otherwise browsers request one
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _table(kind: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are HTML."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


# -- the front page ------------------------------------------------------------------------------

# One script for both packages: tinkex has the same names as the official SDK.
_SCRIPT: Final = """\
import {package}
from {package} import types

service = {package}.ServiceClient({arguments})
training = service.create_lora_training_client({model}, rank=8)
tokens = training.get_tokenizer().encode("The sky is green today.")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={{"target_tokens": tokens[1:], "weights": [1.0] * len(tokens[1:])}},
)
for _ in range(5):
    loss = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(loss.result().metrics)
"""


def front_page(
    *,
    url: str,
    version: str,
    models: Sequence[tuple[str, int]],
    sessions: int,
    runs: int,
    checkpoints: int,
    uptime_seconds: float,
) -> str:
    """The front page; `models` are pairs of name and context length in tokens."""
    model = _quoted(models[0][0] if models else "some/model")
    ours = _SCRIPT.format(
        package="tinkex", arguments=f'base_url={_quoted(url)}, api_key="tml-local"', model=model
    )
    official = _SCRIPT.format(package="tinker", arguments="", model=model)
    settings = f"export TINKER_BASE_URL={shlex.quote(url)}\nexport TINKER_API_KEY=tml-local\n"
    counts = {
        "sessions": f"{sessions:,}",
        "training runs": f"{runs:,}",
        "checkpoints": f"{checkpoints:,}",
        "up for": _duration(uptime_seconds),
    }
    body = f"""<main>
<header>
<div class="state">Running</div>
<h1>tinkex</h1>
<p>This is a service for fine-tuning language models, on your own machine. It speaks the Tinker API: you write the
training loop, the service trains a LoRA adapter and samples from it.</p>
<p>Clients reach it at <code>{escape(url)}</code>.</p>
<p class="go"><a href="/docs">API reference</a> <a href="/openapi.json">openapi.json</a></p>
<dl class="counts">{_counts(counts)}</dl>
</header>
<section>
<h2>Base models</h2>
{_models(models)}
</section>
<section>
<h2>Try it</h2>
<p>Save this as <code>try.py</code> and run it. It teaches a new adapter one sentence, and the loss falls as it learns.
The tokenizer needs <code>pip install 'tinkex[hf]'</code>.</p>
{_code(ours)}
</section>
<section>
<h2>With the official SDK</h2>
<p>Its scripts run unchanged. Set the address of this service:</p>
{_code(settings)}
<p>Then the same script reads:</p>
{_code(official)}
</section>
<footer>tinkex {escape(version)} · a community project, not affiliated with Thinking Machines</footer>
</main>"""
    return _page("tinkex", _FRONT_STYLE, body)


def _quoted(text: str) -> str:
    """A valid Python string literal, whatever the text contains."""
    return json.dumps(text, ensure_ascii=False)


def _code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def _counts(counts: Mapping[str, str]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(count)}</dd></div>"
        for name, count in counts.items()
    )


def _models(models: Sequence[tuple[str, int]]) -> str:
    if not models:
        return '<p class="soft">None yet: the service was started without a model.</p>'
    rows = [(f"<code>{escape(name)}</code>", f"{length:,} tokens") for name, length in models]
    return _table("models", ("model", "context"), rows)


def _duration(seconds: float) -> str:
    """A duration in its two largest units."""
    left = max(0, int(seconds))
    parts: list[tuple[int, str]] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, name))
    shown = [f"{count} {name}" for count, name in parts[:2] if count]
    return " ".join(shown) or "0 s"


# -- the reference -------------------------------------------------------------------------------


def docs_page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as a page: operations by tag, each collapsed, then the schemas they use."""
    return _Reference(document).page()


class _Reference:
    """An OpenAPI document and the links between its parts."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._schemas: Mapping[str, Any] = document.get("components", {}).get("schemas", {})
        self._calls = [
            (path, method, call)
            for path, item in document.get("paths", {}).items()
            for method, call in item.items()
        ]
        self._anchors = {name: f"schema-{name}" for name in self._schemas}
        self._anchors |= {
            call["operationId"]: f"call-{call['operationId']}" for *_, call in self._calls
        }

    def page(self) -> str:
        info = self._document["info"]
        tags = self._document.get("tags", [])
        title = f"{info['title']} API"
        themes = "\n".join(map(self._theme, tags))
        schemas = "\n".join(self._schema(name) for name in self._schemas)
        body = f"""<div class="columns">
<nav aria-label="Contents"><p><a href="/">← {escape(info["title"])}</a></p>
{"".join(map(self._contents, tags))}
<a href="#schemas">Schemas</a>
</nav>
<main>
<h1>{escape(title)} <span class="soft">{escape(info["version"])}</span></h1>
{self._prose(info.get("summary"))}
{self._prose(info.get("description"))}
{self._security()}
<p>Bodies are JSON unless stated otherwise. Programs can read the same reference as
<a href="/openapi.json">openapi.json</a>.</p>
{themes}
<h2 id="schemas">Schemas</h2>
{schemas}
</main>
</div>"""
        return _page(title, _DOCS_STYLE, body)

    def _of_theme(self, name: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        return (entry for entry in self._calls if name in entry[2].get("tags", ()))

    def _contents(self, tag: Mapping[str, Any]) -> str:
        items = "".join(
            f"<li>{self._link(call['operationId'])}</li>"
            for *_, call in self._of_theme(tag["name"])
        )
        return f'<a href="#{_slug(tag["name"])}">{escape(tag["name"])}</a><ul>{items}</ul>\n'

    def _security(self) -> str:
        schemes = self._document.get("components", {}).get("securitySchemes", {})
        return "".join(
            f"<p>Every call carries the header <code>{escape(scheme['name'])}</code>. "
            f"{self._inline(scheme.get('description', ''))}</p>"
            for scheme in schemes.values()
            if scheme.get("in") == "header"
        )

    def _theme(self, tag: Mapping[str, Any]) -> str:
        calls = "\n".join(self._call(*entry) for entry in self._of_theme(tag["name"]))
        return (
            f'<section><h2 id="{_slug(tag["name"])}">{escape(tag["name"])}</h2>\n'
            f"{self._prose(tag.get('description'))}\n{calls}</section>"
        )

    # -- calls -------------------------------------------------------------------------------

    def _call(self, path: str, method: str, call: Mapping[str, Any]) -> str:
        # The anchor is inside, because browsers expand the element that contains the target of a link.
        return f"""<details class="call"><summary><span class="method {escape(method)}">{escape(method.upper())}</span>
<code>{escape(path)}</code> <span class="soft">{self._inline(call.get("summary", ""))}</span></summary>
<div class="inside" id="{escape(self._anchors[call["operationId"]])}">
<p class="soft">Operation <code>{escape(call["operationId"])}</code></p>
{self._prose(call.get("description"))}
{self._parameters(call.get("parameters", ()))}
{self._request(call.get("requestBody"))}
{self._answers(call.get("responses", {}))}
</div></details>"""

    def _parameters(self, parameters: Sequence[Mapping[str, Any]]) -> str:
        if not parameters:
            return ""
        rows = [
            (
                _field_name(entry["name"], entry.get("required", False)),
                f"{self._type(entry['schema'])} <span class='soft'>in the {escape(entry['in'])}</span>",
                self._notes(entry["schema"] | {"description": entry.get("description", "")}),
            )
            for entry in parameters
        ]
        return "<h4>Parameters</h4>" + _table("fields", ("name", "type", "notes"), rows)

    def _request(self, body: Mapping[str, Any] | None) -> str:
        if body is None:
            return ""
        parts = ["<h4>Request</h4>", self._content(body["content"])]
        for media in body["content"].values():
            reference = media["schema"].get("$ref")
            if reference:
                parts.append(self._fields(self._schemas[_last(reference)]))
        return "\n".join(parts)

    def _answers(self, answers: Mapping[str, Any]) -> str:
        found = ((status, self._found(entry)) for status, entry in answers.items())
        rows = [
            (
                f"<code>{escape(status)}</code>",
                self._prose(answer["description"]) + self._headers(answer.get("headers", {})),
                self._content(answer.get("content", {})),
            )
            for status, answer in found
        ]
        return "<h4>Answers</h4>" + _table("answers", ("status", "meaning", "body"), rows)

    def _headers(self, headers: Mapping[str, Any]) -> str:
        return "".join(
            f'<p class="soft">Header <code>{escape(name)}</code>: {self._inline(header["description"])}</p>'
            for name, header in headers.items()
        )

    def _content(self, content: Mapping[str, Any]) -> str:
        return "".join(
            f"<p>{self._body(media['schema'])}{_as_media_type(media_type)}</p>"
            for media_type, media in content.items()
        )

    def _body(self, schema: Mapping[str, Any]) -> str:
        return (
            self._inline(schema["description"]) if "description" in schema else self._type(schema)
        )

    def _found(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entry, or the target of its `$ref`."""
        if "$ref" not in entry:
            return entry
        found: Any = self._document
        for step in entry["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        referred: Mapping[str, Any] = found
        return referred

    # -- schemas -----------------------------------------------------------------------------

    def _schema(self, name: str) -> str:
        schema = self._schemas[name]
        anchor = escape(self._anchors[name])
        return (
            f'<section class="schema" id="{anchor}"><h3>{escape(name)}</h3>\n'
            f"{self._prose(schema.get('description'))}\n{self._fields(schema)}</section>"
        )

    def _fields(self, schema: Mapping[str, Any]) -> str:
        if schema.get("type") != "object":
            return f"<p>{self._type(schema)}</p>"
        fields = schema.get("properties", {})
        if not fields:
            return '<p class="soft">No fields.</p>'
        required = schema.get("required", ())
        rows = [
            (_field_name(name, name in required), self._type(field), self._notes(field))
            for name, field in fields.items()
        ]
        return _table("fields", ("field", "type", "notes"), rows) + self._exclusive(schema)

    def _exclusive(self, schema: Mapping[str, Any]) -> str:
        names = [name for choice in schema.get("oneOf", ()) for name in choice.get("required", ())]
        if not names:
            return ""
        listed = " and ".join(f"<code>{escape(name)}</code>" for name in names)
        return f'<p class="soft">Exactly one of {listed} is present.</p>'

    def _notes(self, schema: Mapping[str, Any]) -> str:
        notes = [self._inline(schema.get("description", ""))]
        default = schema.get("default")
        if default is not None and default != schema.get("const"):
            notes.append(f"default <code>{escape(json.dumps(default))}</code>")
        return " ".join(filter(None, notes))

    def _type(self, schema: Mapping[str, Any]) -> str:
        """A short description of a schema's type."""
        if "$ref" in schema:
            return self._link(_last(schema["$ref"]))
        if "const" in schema:
            return f"<code>{escape(json.dumps(schema['const']))}</code>"
        if "enum" in schema:
            return " | ".join(
                f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"]
            )
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices and "properties" not in schema:
            return " or ".join(map(self._type, choices))
        kind = schema.get("type", "anything")
        if isinstance(kind, list):
            return " or ".join(map(escape, kind))
        if kind == "array":
            return self._array(schema)
        values = schema.get("additionalProperties")
        if isinstance(values, Mapping):
            return f"object of {self._grouped(values)}"
        return escape(" ".join([kind, *_limits(schema)]))

    def _array(self, schema: Mapping[str, Any]) -> str:
        if "prefixItems" in schema:
            return "[" + ", ".join(map(self._type, schema["prefixItems"])) + "]"
        limits = escape(" ".join(["", *_limits(schema)]))
        return f"list of {self._grouped(schema.get('items', {}))}{limits}"

    def _grouped(self, schema: Mapping[str, Any]) -> str:
        written = self._type(schema)
        return f"({written})" if " or " in written else written

    # -- text --------------------------------------------------------------------------------

    def _link(self, name: str) -> str:
        anchor = self._anchors.get(name)
        if anchor is None:
            return f"<code>{escape(name)}</code>"
        return f'<a href="#{escape(anchor)}">{escape(name)}</a>'

    def _inline(self, text: str) -> str:
        """Text with its `code`, which becomes a link if it names an operation or a schema."""
        pieces = re.split(r"`([^`]*)`", text)
        return "".join(
            self._link(piece) if index % 2 else escape(piece) for index, piece in enumerate(pieces)
        )

    def _prose(self, text: str | None) -> str:
        paragraphs = (text or "").split("\n\n")
        return "".join(f"<p>{self._inline(part)}</p>" for part in paragraphs if part.strip())


def _as_media_type(media_type: str) -> str:
    if media_type == "application/json":  # the default: not mentioned
        return ""
    return f' <span class="soft">as <code>{escape(media_type)}</code></span>'


def _field_name(name: str, required: bool) -> str:
    mark = ' <span class="must">required</span>' if required else ""
    return f"<code>{escape(name)}</code>{mark}"


_LIMITS: Final = {
    "format": "({})",
    "contentEncoding": "({})",
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "of {} or more characters",
    "minItems": "with {} or more",
    "maxItems": "with at most {}",
}


def _limits(schema: Mapping[str, Any]) -> list[str]:
    return [text.format(schema[name]) for name, text in _LIMITS.items() if name in schema]


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]


def _slug(text: str) -> str:
    return "tag-" + re.sub(r"[^a-z0-9]+", "-", text.lower())
