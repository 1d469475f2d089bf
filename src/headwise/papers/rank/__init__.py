"""Paper `rank`: On the Limitation and Redundancy of Transformers: A Rank Perspective."""

from headwise.records.papers import Claim

CLAIMS = (
    Claim(
        "barrier",
        "With random weights and orthonormal inputs the rank of hardmax attention stays below (1 - 1/e) n.",
        "0.63 n",
        "random",
    ),
    Claim("not-a-limit", "So 0.63 n limits what attention can express.", "the title's limitation", "random"),
    Claim("saturation", "The rank saturates in the head width at the order of log n.", "Omega(log n)", "random"),
    Claim(
        "small-gain",
        "Table 2: the width at which a dimension adds less than about 0.01 grows like log n.",
        "not recovered",
        "random",
    ),
    Claim(
        "key-norms",
        "Ours: uneven key norms set the saturation; unit keys saturate at 4 dimensions.",
        "not in the paper",
        "random",
    ),
    Claim("inputs", "The barrier holds for random data of several distributions.", "a figure", "random"),
    Claim("causal", "Ours: under a causal mask the limit is (n + 1) / 2.", "not in the paper", "random"),
    Claim(
        "softmax",
        "Softmax attention has the same barrier, by numerical rank.",
        "0.63 n, tolerance not recovered",
        "temperature",
    ),
    Claim(
        "softmax-inputs",
        "So it has at every length, for inputs of several distributions.",
        "0.63 n, tolerance not recovered",
        "random",
    ),
    Claim("lemma", "Lemma 1: softmax is near hardmax at low temperature.", "a bound", "temperature"),
    Claim(
        "one-dimension",
        "A reviewer: with softmax the rank is full at one dimension, falls, then rises with the width.",
        "not shown in the paper",
        "temperature",
    ),
    Claim(
        "accuracy",
        "In trained models accuracy saturates with the rank of the first layer (here: digits, chapters).",
        "figures",
        "trained",
    ),
    Claim("trained-rank", "Trained heads keep to the barrier's picture.", "assumed from initialisation", "trained"),
    Claim(
        "forced",
        "Reviewers asked: the rank limit causes the plateau of the loss (digits).",
        "correlation only in the paper",
        "forced",
    ),
    Claim(
        "forced-needed",
        "Ours: so it does on a task that needs a high rank (reversing a text).",
        "not in the paper",
        "forced",
    ),
    Claim(
        "latent-random",
        "Latent attention (MLA) behaves the same: the rank saturates in the head width.",
        "not recovered",
        "latent",
    ),
    Claim("latent-trained", "And so does its performance.", "not recovered", "latent"),
    Claim(
        "variant",
        "Figure 4b of the first version: a variant exceeds the barrier (0.68) for heads narrower than 5.",
        "0.68",
        reason="What the variant is could not be recovered.",
    ),
    Claim(
        "large-vision",
        "Accuracy and rank of ViTs on CIFAR-10, CIFAR-100 and SVHN, text on IMDB.",
        "figures",
        reason="Digits and chapters of Python's manual, which come with packages, stand in (accuracy).",
    ),
)
