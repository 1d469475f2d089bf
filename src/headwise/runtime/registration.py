"""Makes transformers' auto classes know headwise's per-layer models, as soon as both are imported.

transformers has no plug-in point for architectures, and importing it here would cost seconds and torch. So a finder
waits for its auto classes to be imported and registers then.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

AUTO = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register now if transformers' auto classes are there, otherwise once they are."""
    if AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    from transformers import AutoConfig, PreTrainedConfig  # noqa: PLC0415 - this is the whole point of waiting

    class HeadwiseConfig(PreTrainedConfig):
        """Hands a config.json of type "headwise" to the modelling file, which is imported only then."""

        model_type = "headwise"

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            from headwise.runtime import modeling_headwise  # noqa: PLC0415 - needs torch

            return modeling_headwise.HeadwiseConfig.from_dict(config_dict, **kwargs)

    AutoConfig.register(HeadwiseConfig.model_type, HeadwiseConfig, exist_ok=True)


class _Waiting(MetaPathFinder):
    """Finds one module, the way it would have been found anyway, and registers after it has run."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register()
