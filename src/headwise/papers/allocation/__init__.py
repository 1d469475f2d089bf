"""Paper `allocation`: Allocation of Parameters in Transformers (arXiv 2510.03784)."""

from headwise.records.papers import Claim

CLAIMS = (
    Claim("bound-curve", "Figure 1: the error bound E_128 is lowest at 8 heads.", "0.166 at H = 8", "bound"),
    Claim(
        "allocation-rule",
        "Problem (5): four equal lags, width 256 and tokens of 8 take 8 heads of 8 for each lag.",
        "(8, 8) x 4",
        "bound",
    ),
    Claim(
        "selection-term",
        "Theorem 1: H heads pick out lag m with an error of at most 1.3 e^{0.02 m} / H.",
        "0.352 for lag 4 with 4 heads",
        "bound",
    ),
    Claim(
        "gram-drop",
        "Figure 2: on a 4-gram task the error falls steeply with the number of heads.",
        "0.320 at 1 head, 0.017 at 8",
        "ngram",
    ),
    Claim(
        "gram-upturn",
        "Figure 2: beyond the best number of heads the error rises again.",
        "0.0167 at 8, 0.0234 at 16, 0.0559 at 32",
        "ngram",
    ),
    Claim(
        "gram-prediction",
        "The best number of heads is the one Problem (5) predicts.",
        "8 (of what, is not said)",
        "ngram",
    ),
    Claim(
        "gram-norm",
        "Criticism: the upturn comes with a query-key norm, which caps how sharp a narrow head can be.",
        "a replication: monotone without, U-shaped with it",
        "ngram",
    ),
    Claim(
        "copy",
        "Special case: copying the previous token, step 1 of an induction head, takes the heads that the rule says.",
        "a special case of Theorem 1",
        "special",
    ),
    Claim(
        "induction",
        "Special case: so does the whole induction head, two layers.",
        "named, not measured",
        "special",
    ),
    Claim(
        "nonlinear",
        "Extension: so do nonlinear maps of a sequence.",
        "named, under strong assumptions",
        "special",
    ),
    Claim("saturation", "Theorem 2: the norm of the softmax Jacobian is O(1/L).", "O(1/L), bounded logits", "jacobian"),
    Claim(
        "small-change",
        "Corollary 2: a narrower head changes attention by O(1/L).",
        "O(Lambda / L)",
        "jacobian",
    ),
    Claim(
        "trained-saturation",
        "Figure 3: on a trained model the norm falls with L, compatible with 1/L.",
        "L = 4 to 1024, a figure",
        "trained",
    ),
    Claim("logits-grow", "Figure 10: logits grow with L.", "a figure", "trained"),
    Claim(
        "real-saturation",
        "Figure 3 on a real model (SmolLM2-135M): the norm falls like 1/L.",
        "L = 4 to 1024, a figure",
        "real",
    ),
    Claim("real-logits", "Figure 10 on a real model: logits grow with L.", "a figure", "real"),
    Claim(
        "one-head",
        "Figures 4 and 6: one head of 64 dimensions, cut to 4 by SVD and fine-tuned, follows its teacher.",
        "a figure",
        "trained",
    ),
    Claim(
        "weighted-start",
        "Ours: weighting by what the model sees is a better start than SVD of the weights.",
        "not in the paper",
        "trained",
    ),
    Claim("later-layers", "Later layers can be cut more than early ones.", "no evidence, say reviewers", "trained"),
    Claim("real-later-layers", "So they can in a real model (SmolLM2-135M).", "no evidence, say reviewers", "real"),
    Claim(
        "whole-model",
        "Reviewers asked: cut a whole model by layers against uniformly, at equal parameters.",
        "not in the paper",
        "trained",
    ),
    Claim(
        "dim-or-count",
        "Figure 5: narrower heads cost less than fewer heads at equal parameters.",
        "a figure, 6 layers, 1 % of WikiText-103",
        "shapes",
    ),
    Claim(
        "later-or-uniform",
        "Strategy: leave early layers whole and narrow the later ones.",
        "no uniform baseline in the paper",
        "shapes",
    ),
    Claim(
        "dominant-heads",
        "Motivation: later layers use few dominant heads.",
        "a citation",
        "real",
    ),
    Claim(
        "compute",
        "15 to 25 % less compute at equal accuracy.",
        "quoted by a third party",
        reason="No figure of the paper supports it; its reviewers say nothing of the kind was measured.",
    ),
)
