"""The families headwise knows, one small file of data each. To add one: copy a file, list it here."""

from headwise.families.family import Family
from headwise.families.known import (
    bert,
    deepseek,
    distilbert,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    opt,
    phi,
    phi3,
    qwen3,
    vit,
    whisper,
)
from headwise.files.errors import InputError

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    deepseek.FAMILY,
    distilbert.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    llama.FAMILY,
    opt.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    qwen3.FAMILY,
    vit.FAMILY,
    whisper.FAMILY,
)
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(model_type: str) -> Family:
    """The family that ``model_type`` of a stock config belongs to."""
    if model_type not in BY_MODEL_TYPE:
        raise InputError(
            f"headwise does not know the architecture {model_type!r}; it knows {', '.join(sorted(BY_MODEL_TYPE))}. "
            "To add one, see 'Adding a family' in CONTRIBUTING.md."
        )
    return BY_MODEL_TYPE[model_type]
