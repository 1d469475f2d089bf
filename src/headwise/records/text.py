"""How a file of text is to be read."""

from typing import Literal

# lines: every line is an example of its own; document: one long text; auto: lines where each is a single word.
TextFormat = Literal["auto", "lines", "document"]
