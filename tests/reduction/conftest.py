"""Small models of all families, each measured once."""

import pytest
import torch

import headwise as hw
from tests.tiny import tiny


def inputs():
    return [{"input_ids": torch.randint(3, 97, (2, 48), generator=torch.Generator().manual_seed(i))} for i in range(8)]


@pytest.fixture(scope="package")
def profiles():
    """A function from the name of a family to its model and profile."""
    known = {}

    def profile(name):
        if name not in known:
            model = tiny(name)
            config = hw.InspectConfig(tokens=512, maps=False)
            known[name] = model, hw.inspect(model, inputs=inputs(), config=config, checks=False)
        return known[name]

    return profile
