"""A fake arXiv server: the Atom API, abstracts, and a PDF for each version.

A paper is `{"id", "versions", "title", "authors", "summary", "published", "updated", "categories"}`. The API
follows arXiv's manual (info.arxiv.org/help/api/user-manual.html): `id_list`, `search_query` with fields, AND,
OR, ANDNOT and parentheses, `start`, `max_results`, `sortBy`, `sortOrder`. Bare words are combined with AND;
results are not ranked.
"""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

Paper = dict[str, Any]

NAMES = ("arxiv.org", "www.arxiv.org", "export.arxiv.org")

TOKEN = re.compile(r'(?:\w+:)?"[^"]*"|[()]|[^\s()]+')
ADDRESS = re.compile(r"/(abs|pdf)/(?P<id>[\w./-]*?\d)(?:v(?P<version>\d+))?(?:\.pdf)?")
FIELDS = {"ti": ("title",), "au": ("authors",), "abs": ("summary",), "cat": ("categories",)}
EVERYWHERE = ("title", "authors", "summary", "categories")
ORDERS = {"submittedDate": "published", "lastUpdatedDate": "updated"}

FEED = """<?xml version="1.0" encoding="UTF-8"?>
<feed xmlns="http://www.w3.org/2005/Atom">
<title type="html">ArXiv Query</title><id>http://arxiv.org/api/query</id><updated>2026-01-01T00:00:00Z</updated>
<opensearch:totalResults xmlns:opensearch="http://a9.com/-/spec/opensearch/1.1/">{total}</opensearch:totalResults>
<opensearch:startIndex xmlns:opensearch="http://a9.com/-/spec/opensearch/1.1/">{start}</opensearch:startIndex>
{entries}
</feed>
"""
ENTRY = """<entry>
<id>http://arxiv.org/abs/{address}</id><title>{title}</title><summary>{summary}</summary>
<published>{published}</published><updated>{updated}</updated>
{authors}{categories}
<arxiv:primary_category xmlns:arxiv="http://arxiv.org/schemas/atom" term="{primary}"/>
<link href="http://arxiv.org/abs/{address}" rel="alternate" type="text/html"/>
<link title="pdf" href="https://arxiv.org/pdf/{address}" rel="related" type="application/pdf"/>
</entry>"""


def search(papers: list[Paper], query: str) -> list[Paper]:
    """Return the papers that match a `search_query`."""
    tokens = TOKEN.findall(query)
    return [paper for paper in papers if _matches(list(tokens), paper)] if tokens else []


def _matches(tokens: list[str], paper: Paper) -> bool:
    """Evaluate from left to right; a parenthesis is one term, a missing operator is AND."""
    result = True
    while tokens and tokens[0] != ")":
        operator = tokens.pop(0) if tokens[0] in ("AND", "OR", "ANDNOT") else "AND"
        if not tokens:
            break
        token = tokens.pop(0)
        term = _matches(tokens, paper) if token == "(" else _contains(paper, token)
        result = (result or term) if operator == "OR" else (result and term == (operator == "AND"))
    if tokens:
        tokens.pop(0)
    return result


def _contains(paper: Paper, term: str) -> bool:
    field, colon, value = term.rpartition(":") if term.split(":")[0] in {*FIELDS, "all"} else ("", "", term)
    text = json.dumps([paper[name] for name in (FIELDS.get(field, EVERYWHERE) if colon else EVERYWHERE)])
    return value.strip('"').casefold() in text.casefold()


def feed(papers: list[Paper], params: dict[str, str]) -> str:
    """Return the response of `/api/query`."""
    selected = papers
    if id_list := [item for item in params.get("id_list", "").split(",") if item]:
        ids = {re.sub(r"v\d+$", "", item) for item in id_list}
        selected = [paper for paper in papers if paper["id"] in ids]
    if query := params.get("search_query", ""):
        selected = search(selected, query)
    elif not id_list:
        selected = []
    if order := ORDERS.get(params.get("sortBy", "")):
        selected = sorted(
            selected, key=lambda paper: paper[order], reverse=params.get("sortOrder") != "ascending"
        )
    start, count = int(params.get("start") or 0), int(params.get("max_results") or 10)
    entries = "\n".join(_entry(paper) for paper in selected[start : start + count])
    return FEED.format(total=len(selected), start=start, entries=entries)


def _entry(paper: Paper) -> str:
    text_fields = {name: escape(paper[name]) for name in ("title", "summary", "published", "updated")}
    authors = "".join(f"<author><name>{escape(name)}</name></author>" for name in paper["authors"])
    scheme = "http://arxiv.org/schemas/atom"
    categories = "".join(f'<category term="{term}" scheme="{scheme}"/>' for term in paper["categories"])
    address = f"{paper['id']}v{paper['versions']}"
    return ENTRY.format(
        address=address, authors=authors, categories=categories, primary=paper["categories"][0], **text_fields
    )


def pdf(paper: Paper, version: int) -> bytes:
    """Return a page with the paper's title, version and summary; the file differs for every version."""
    lines = [
        paper["title"],
        f"arXiv:{paper['id']}v{version}",
        *re.findall(r".{1,80}(?:\s|$)", paper["summary"]),
    ]
    escaped = [re.sub(r"([()\\])", r"\\\1", line) for line in lines]
    operators = " ".join(f"({line}) Tj T*" for line in escaped)
    text = f"BT /F1 11 Tf 14 TL 56 760 Td {operators} ET".encode("latin-1", "replace")
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources 6 0 R >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(text), text),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Font << /F1 5 0 R >> >>",
    ]
    document, offsets = b"%PDF-1.4\n", list[int]()
    for number, content in enumerate(objects, 1):
        offsets.append(len(document))
        document += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    table_offset = len(document)
    document += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return document + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, table_offset)


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    papers: list[Paper] = []  # noqa: RUF012  (set once, before the first request)
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/api/query":
            params = {name: values[0] for name, values in parse_qs(address.query).items()}
            self._respond("application/atom+xml; charset=utf-8", feed(self.papers, params).encode())
        elif (match := ADDRESS.fullmatch(address.path)) and (paper := self._paper(match)):
            version = int(match["version"] or paper["versions"])
            if match[1] == "pdf":
                self._respond("application/pdf", pdf(paper, version))
            else:
                self._respond("text/html; charset=utf-8", f"<h1>{escape(paper['title'])}</h1>".encode())
        else:
            self.send_error(404)

    def _paper(self, match: re.Match[str]) -> Paper | None:
        return next(
            (
                paper
                for paper in self.papers
                if paper["id"] == match["id"] and 1 <= int(match["version"] or 1) <= paper["versions"]
            ),
            None,
        )

    def _respond(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
