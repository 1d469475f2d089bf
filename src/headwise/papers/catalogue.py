"""Which papers there are, their claims, and the experiments that decide them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from headwise.files.errors import InputError
from headwise.records.papers import Claim

SIZES = ("quick", "full")


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper by its key."""

    key: str
    title: str
    source: str

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All it claims, as far as we could read."""
        return import_module(f"headwise.papers.{self.key}").CLAIMS

    @property
    def experiments(self) -> tuple[str, ...]:
        """Names of the experiments that decide its claims."""
        return tuple(dict.fromkeys(claim.experiment for claim in self.claims if claim.experiment))


PAPERS = {
    paper.key: paper
    for paper in (
        Paper("allocation", "Allocation of Parameters in Transformers", "arXiv 2510.03784"),
        Paper("rank", "On the Limitation and Redundancy of Transformers: A Rank Perspective", "OpenReview GoK1PfVgXU"),
        Paper("heads", "The Effect of Attention Head Count on Transformer Approximation", "arXiv 2510.06662"),
        Paper("depth", "Leaner Transformers: More Heads, Less Depth", "arXiv 2505.20802"),
    )
}


def find(selection: str) -> list[tuple[str, str]]:
    """Keys of paper and experiment named by "all", "KEY" or "KEY/EXPERIMENT"."""
    if selection == "all":
        return [(paper.key, name) for paper in PAPERS.values() for name in paper.experiments]
    key, _, experiment = selection.partition("/")
    if key not in PAPERS:
        raise InputError(f"There is no paper {key!r}; choose one of {', '.join(PAPERS)} or all.")
    names = PAPERS[key].experiments
    if not experiment:
        return [(key, name) for name in names]
    if experiment not in names:
        raise InputError(f"Paper {key} has no experiment {experiment!r}; choose one of {', '.join(names)}.")
    return [(key, experiment)]


def module_of(paper: str, experiment: str) -> ModuleType:
    """The module of an experiment: Settings, run, check, draw."""
    return import_module(f"headwise.papers.{paper}.{experiment}")
