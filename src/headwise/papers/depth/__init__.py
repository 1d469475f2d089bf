"""Paper `depth`: Leaner Transformers: More Heads, Less Depth (arXiv 2505.20802)."""

from headwise.records.papers import Claim

CLAIMS = (
    Claim(
        "theorem",
        "Theorem 3.2: Gaussian heads side by side have condition number (sqrt(hd) + sqrt(N)) / (sqrt(hd) - sqrt(N)).",
        "a formula",
        "gaussian",
    ),
    Claim(
        "more-heads",
        "With heads of one width the condition number tends to 1 with more heads.",
        "kappa -> 1",
        "gaussian",
    ),
    Claim(
        "fixed-width",
        "More heads condition better (as the lean models add them: at one total width).",
        "implied",
        "gaussian",
    ),
    Claim(
        "softmax-heads", "Real attention at initialisation: more heads condition better.", "figures, ViT-B", "softmax"
    ),
    Claim(
        "jacobian",
        "Second version: the Jacobian of attention is conditioned better with more heads.",
        "a theorem",
        "softmax",
    ),
    Claim("counts", "Parameters of the redesigned architectures.", "XCiT-L 189.1 -> 103.8 M, and so on", "parameters"),
    Claim("savings", "30 to 50 % fewer parameters.", "30 to 50 %", "parameters"),
    Claim(
        "lean-images",
        "Images: half the depth with more heads keeps the accuracy (ImageNet; here digits).",
        "XCiT-L 82.1 -> 82.4 %, TNT-B 82.3 -> 82.3 %",
        "lean",
    ),
    Claim(
        "lean-photos",
        "Images: so it does on photographs (here 10,000 of CIFAR-10).",
        "XCiT-M 81.4 -> 81.7 %, DaViT-L 83.6 -> 83.6 %",
        "lean",
    ),
    Claim(
        "lean-text",
        "Language: 4 layers of 16 heads beat 12 layers of 12 (TinyStories; here characters of our texts).",
        "better validation loss, value not recovered",
        "lean",
    ),
    Claim(
        "lean-listops",
        "ListOps: fewer layers with more heads win (Long-Range Arena; here shorter expressions).",
        "36.4 -> 37.4 % for 2 -> 8 heads",
        "lean",
    ),
    Claim("heads-pay", "It is the heads that make up for depth.", "no shallow control in the paper", "lean"),
    Claim("equal-depth", "At equal depth and width more heads score better.", "figures, ViT-B", "lean"),
    Claim(
        "equal-depth-wide",
        "So they do where heads keep their width, with more parameters.",
        "36.4 -> 37.4 % for 2 -> 8 heads (ListOps)",
        "lean",
    ),
    Claim("equal-size", "Reviewers asked: at equal parameters.", "not in the paper", "lean"),
    Claim(
        "equal-work",
        "At equal work (weights times steps).",
        "not in the paper",
        "lean",
    ),
    Claim("equal-time", "Reviewers asked: at equal wall-clock time of training.", "not in the paper", "lean"),
    Claim(
        "equal-time-shallow",
        "Ours: half the depth without more heads does as well at equal time.",
        "no shallow control in the paper",
        "lean",
    ),
    Claim(
        "head-width",
        "The other reading, where heads keep their width and the attention doubles: half the depth keeps the score.",
        "Long-Range Arena: heads of 32",
        "lean",
    ),
    Claim(
        "half-mlp",
        "As in the rows of ViT, DeiT and TNT: half the MLP as well.",
        "ViT-B 12 layers of 12 heads -> 7 of 16, TNT-B 82.3 -> 82.3 %",
        "lean",
    ),
    Claim("conditioning", "Better conditioning lasts through training and makes it faster.", "figures, ViT-B", "lean"),
    Claim(
        "one-layer",
        "ListOps: one layer of 4 or more heads beats two layers, with fewer parameters.",
        "a table, values not recovered",
        "lean",
    ),
    Claim(
        "imagenet",
        "Twelve architectures on ImageNet-1k.",
        "81.4 -> 81.7 (XCiT-M), 83.3 -> 83.5 % (DaViT-B), and so on",
        reason="ImageNet and 300 epochs of it are out of reach.",
    ),
    Claim(
        "glue",
        "Crammed BERT with 10 layers of 24 heads keeps the GLUE average.",
        "78.6 -> 78.6",
        reason="Takes a GPU-day of pretraining on the Pile.",
    ),
    Claim(
        "long-range",
        "Text, Retrieval, Image and Pathfinder of the Long-Range Arena.",
        "not recovered",
        reason="The data does not come with a package; ListOps is made here (lean-listops).",
    ),
)
