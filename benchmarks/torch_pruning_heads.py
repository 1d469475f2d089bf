"""Key/value heads removed by Torch-Pruning, by magnitude: one row for the table of benchmarks/compress.py.

    python benchmarks/torch_pruning_heads.py MODEL WINDOWS.safetensors SHARE

Run as a process of its own, because its dependency graph may take without end: prints the loss, bytes and parameters.
"""

import json
import sys

import torch
import torch_pruning
from compress import loss
from safetensors.torch import load_file

from headwise.checkpoints.load import open_model
from headwise.families.sites import sites_of
from headwise.tracing.speed import cache_per_token


def main(source, windows_file, share):
    windows = load_file(windows_file)["windows"]
    model = open_model(source).float()
    sites = sites_of(model)
    heads = {}
    for site in sites:
        width = site.head_width
        for name in (site.family.q, site.family.k, site.family.v):
            linear = getattr(site.module, name)
            heads[linear] = linear.out_features // width
    ignored = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module not in heads]
    pruner = torch_pruning.pruner.BasePruner(
        model,
        example_inputs=windows[:1, :16],
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=1 - float(share),
        head_pruning_ratio=1 - float(share),
        prune_num_heads=True,
        prune_head_dims=False,
        num_heads=heads,
        ignored_layers=ignored,
        output_transform=lambda output: output.logits,
    )
    pruner.step()
    attention = sum(
        getattr(site.module, n).weight.numel() for site in sites for n in (site.family.q, site.family.k, site.family.v)
    )
    attention += sum(site.out.weight.numel() for site in sites)
    print(json.dumps({"loss": loss(model, windows), "kv": cache_per_token(model), "attention": attention}))


if __name__ == "__main__":
    main(*sys.argv[1:])
