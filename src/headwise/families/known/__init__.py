"""The families headwise knows, one small file of data each. To add one: copy a file, list it here; or at run time."""

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


def register_family(family: Family) -> None:
    """Let this process know ``family``, an architecture of transformers: headwise then takes its models.

    What is saved of them opens anywhere; another process that reduces or measures them must register it again. A family
    already known stays as it is.

    >>> blocks = hw.Stack("layers", attention="self_attn", out="self_attn.o_proj", norms=("input_layernorm",))
    >>> hw.register_family(hw.Family(name="granite", model_types=("granite",), stacks=(blocks,), head_dim=True))
    """
    if not family.model_types or not family.stacks:
        raise InputError(f"The family {family.name} must name its `model_types` and its `stacks`.")
    same_name = [known for known in BY_MODEL_TYPE.values() if known.name == family.name]
    for known in (*same_name, *(BY_MODEL_TYPE.get(model_type, family) for model_type in family.model_types)):
        if known != family:
            raise InputError(f"headwise has a family {known.name} for {', '.join(known.model_types)} already.")
    BY_MODEL_TYPE.update(dict.fromkeys(family.model_types, family))


def family_of(model_type: str) -> Family:
    """The family that ``model_type`` of a stock config belongs to."""
    if model_type not in BY_MODEL_TYPE:
        raise InputError(
            f"headwise does not know the architecture {model_type!r}; it knows {', '.join(sorted(BY_MODEL_TYPE))}. "
            "To add one, see 'Adding a family' in CONTRIBUTING.md."
        )
    return BY_MODEL_TYPE[model_type]
