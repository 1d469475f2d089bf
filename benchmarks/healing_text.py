"""A text to heal on: articles of WikiText and of enwik8 in turn, so that every piece of it is the same mixture.

    python benchmarks/healing_text.py wikitext-103.valid.txt enwik8.gz healing.txt [--megabytes 6]

Of WikiText, paragraphs with an ``<unk>`` go. Of enwik8, tables, templates, references, links' targets and markup go;
paragraphs of at least 200 characters stay. When WikiText ends, enwik8 goes on alone.
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


def wikitext_articles(text):
    """Articles of WikiText, without the paragraphs that miss words."""
    articles = re.split(r"(?m)^(?= = [^=].*[^=] = $)", text)
    kept = ("".join(line for line in article.splitlines(True) if "<unk>" not in line) for article in articles)
    return [article for article in kept if article.strip()]


def enwik8_articles(source, megabytes):
    """The prose of the first pages of enwik8."""
    with gzip.open(source, "rb") as file:
        raw = file.read(int(megabytes * 1e6)).decode("utf-8", errors="ignore")
    pages = re.findall(r"<text[^>]*>(.*?)</text>", raw, flags=re.DOTALL)
    articles = ("\n\n".join(plain(page)) + "\n\n" for page in pages if not page.startswith("#REDIRECT"))
    return [article for article in articles if article.strip()]


def mixed(first, second):
    """Articles of both, always from the one of which less has been taken so far; then the rest of the second."""
    taken, kinds = [0, 0], [iter(first), iter(second)]
    while True:
        kind = int(taken[0] > taken[1])
        article = next(kinds[kind], None)
        if article is None:
            yield from kinds[1]
            return
        taken[kind] += len(article)
        yield article


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("enwik8", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--megabytes", type=float, default=6.0)
    args = parser.parse_args()
    first = wikitext_articles(args.wikitext.read_text(encoding="utf-8"))
    second = enwik8_articles(args.enwik8, args.megabytes)
    text = "".join(mixed(first, second))
    args.output.write_text(text, encoding="utf-8")
    print(f"{len(first)} articles of WikiText, {len(second)} of enwik8, {len(text):,} characters")


if __name__ == "__main__":
    main()
