"""Paper `heads`: The Effect of Attention Head Count on Transformer Approximation (arXiv 2510.06662)."""

from headwise.records.papers import Claim

CLAIMS = (
    Claim(
        "density",
        "Theorem 1: generalised retrieval tasks are dense in the continuous functions of a text.",
        "a proof, no rate",
        reason="A statement of existence: D may explode, there is no number to measure.",
    ),
    Claim("intrinsic", "Corollary 1: a task has one D, once T >= 50 (D1^2 + D2^2).", "constant 50", "constructions"),
    Claim(
        "enough-heads",
        "Theorem 2(1): with h = D heads of width 2 the size needed does not depend on T in its exponent.",
        "error at most (|S|-1)/(e beta) + T e^-beta, gate -1",
        "constructions",
    ),
    Claim(
        "lower-bound",
        "Theorem 2(2): with fewer heads the size grows like (1/eps)^k, k of the order of T.",
        "k = (T/4 - h - D + 1)/((n+1)h + 1) - 1",
        "constructions",
    ),
    Claim(
        "memorising-head",
        "Theorem 2(3): one head as wide as the whole text hands the work to the feed-forward part.",
        "error eps with width O(T/eps)",
        "constructions",
    ),
    Claim(
        "transition",
        "Table 2: the error of D-retrieval falls sharply at h = D = 4, heads of 8.",
        "NMSE 3 -> 4 heads: 11x, 15x, 19x, 150x, 302x (means, T = 8..128)",
        "retrieval",
    ),
    Claim(
        "random-directions",
        "The paper does not say along which directions; ours are at right angles. The same drop for random ones.",
        "as table 2",
        "retrieval",
    ),
    Claim(
        "fixed-width",
        "Table 3: so it does when all models share a total width of 32.",
        "160x, 388x, 803x, 1072x, 837x",
        "retrieval",
    ),
    Claim("three-look-ups", "Table 4: with D = 3 it falls at h = 3.", "2608x, 4116x, 6188x, 2168x, 5261x", "retrieval"),
    Claim(
        "two-layers",
        "Table 5 and Conjecture 1 (layers * heads >= D): with two layers it falls at h = 2.",
        "29x, 69x, 63x, 102x, 112x",
        "retrieval",
    ),
    Claim(
        "growth", "Below D heads the error grows with T.", "2.1x, 2.0x, 2.3x for 1, 2, 3 heads (table 2)", "retrieval"
    ),
    Claim(
        "reversal",
        "The reversal score R(h) turns positive first at h = D.",
        "0, 0, 0.06, 5.3, 4.5 for 1..5 heads (from table 2)",
        "retrieval",
    ),
    Claim("spare-head", "More heads than D add little.", "1.3x to 9.8x lower at h = 5 (table 2)", "retrieval"),
    Claim(
        "min-over-seeds",
        "Some seeds fail at h = D, so the best seed has to be reported.",
        "std above the mean at h = 4 (table 2)",
        "retrieval",
    ),
    Claim(
        "width-scaling",
        "Figure 1b: below D heads the log of the error falls linearly with the log of the hidden neurons.",
        "a figure",
        "width",
    ),
    Claim(
        "width-length",
        "Figure 1b: below D heads longer texts are worse at every size, at D heads they are better.",
        "a figure",
        "width",
    ),
    Claim(
        "text",
        "MS MARCO: training accuracy rises with heads and falls with candidates (here: passages of our own texts).",
        ".60 -> 1.00 (T=8), .30 -> 1.00 (T=32) for 1 -> 16 heads",
        "text",
    ),
    Claim(
        "text-width",
        "Criticism: with 32 dimensions per head, heads are confounded with width.",
        "no control in the paper",
        "text",
    ),
    Claim(
        "text-held-out",
        "MS MARCO: validation accuracy does not gain from heads.",
        ".51 -> .50 (T=8), .25 -> .22 (T=32)",
        "text",
    ),
    Claim("text-law", "Error ~ c T^b exp(a h / T^d) with a < 0.", "a = -1.40, d = 0.25", "text"),
    Claim(
        "images",
        "CIFAR-10 on a growing canvas: training accuracy rises with heads (here: 2,000 images; quick: digits).",
        "48 -> 99.9 % (T=65), 40 -> 99.9 % (T=1025) for 1 -> 24 heads",
        "images",
    ),
    Claim("images-reversal", "The reversal score turns positive at h = 10.", "0 up to 8 heads, 0.13 at 10", "images"),
    Claim(
        "images-width",
        "Criticism: with 16 dimensions per head, heads are confounded with width.",
        "no control in the paper",
        "images",
    ),
    Claim(
        "images-held-out",
        "CIFAR-10: validation accuracy falls again at the most heads.",
        "50 -> 70 -> 65 %",
        "images",
    ),
    Claim(
        "as-published",
        "MS MARCO with frozen BERT embeddings and CIFAR-10 for hundreds of epochs, up to 1,025 tokens.",
        "tables 6 to 9",
        reason="Takes GPUs; a part of CIFAR-10 is trained on for a short while (images), passages stand in (text).",
    ),
)
