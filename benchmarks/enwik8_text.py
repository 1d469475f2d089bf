"""Plain English text out of enwik8's XML and wiki markup, for healing.

    python benchmarks/enwik8_text.py enwik8.gz plain.txt [--megabytes 10]

Tables, templates, references, links' targets and markup go; paragraphs of at least 200 characters stay.
"""

import argparse
import gzip
import html
import re
from pathlib import Path

REMOVED = (
    r"<!--.*?-->",
    r"<ref[^>]*/>",
    r"<ref[^>]*>.*?</ref>",
    r"<(math|gallery|table|timeline|nowiki|pre)[^>]*>.*?</\1>",
    r"<[^>]+>",
    r"\[\[[a-zA-Z-]+:[^\[\]]*\]\]",  # files, categories, other languages
    r"\[https?://[^\s\]]*\]",
)


def plain(page):
    """The prose of one page."""
    text = html.unescape(html.unescape(page))
    for pattern in REMOVED:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for opening, closing in ((r"\{\|", r"\|\}"), (r"\{\{", r"\}\}")):
        inner = re.compile(rf"{opening}(?:(?!{opening}|{closing}).)*{closing}", re.DOTALL)
        while inner.search(text):
            text = inner.sub("", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}", "", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if len(line) >= 200 and line[0] not in "*#:;|=!{"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--megabytes", type=float, default=10.0)
    args = parser.parse_args()
    with gzip.open(args.source, "rb") as file:
        raw = file.read(int(args.megabytes * 1e6)).decode("utf-8", errors="ignore")
    pages = re.findall(r"<text[^>]*>(.*?)</text>", raw, flags=re.DOTALL)
    kept = [line for page in pages if not page.startswith("#REDIRECT") for line in plain(page)]
    args.output.write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(pages)} pages, {len(kept)} paragraphs, {sum(map(len, kept)):,} characters")


if __name__ == "__main__":
    main()
