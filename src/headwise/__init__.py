"""headwise: how many heads, how wide, how deep a Transformer needs to be, and that model.

Importing headwise is cheap (no torch) and makes ``AutoModel...from_pretrained`` open its per-layer models without
``trust_remote_code``, whichever of headwise and transformers is imported first.
"""

from headwise import registration
from headwise.records import Cost, InputError, LayerPlan, LayerShape, ModelShape, Plan, cost_of

__version__ = "0.1.0"

__all__ = ["Cost", "InputError", "LayerPlan", "LayerShape", "ModelShape", "Plan", "__version__", "cost_of"]

registration.register_with_transformers()
