"""How a file of text is to be read."""

from typing import Literal

# lines: every line is an example of its own; document: one long text; auto: lines if each is one long word (proteins).
TextFormat = Literal["auto", "lines", "document"]
