"""What can be said about a model before it is trained, under the names of Opacus' engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from diminuendo import _extras
from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.clipping import Engine


class Validating:
    """The part of `PrivacyEngine` that looks at models."""

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether `validate` finds nothing to refuse."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except DiminuendoError:
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raise where the model has a layer that mixes examples, or that no gradient engine takes.

        What can only be seen by trying the model out is tried with the first batch.
        """
        del optimizer, data_loader
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise InputError(
                    "one that normalises each example on its own",
                    name=f"the layer {name or 'itself'}",
                    value=type(part).__name__,
                    remedy="PrivacyEngine.get_compatible_module(model) replaces it by GroupNorm.",
                )
        Engine(module).close()

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """The model with layers that mix examples replaced, by Opacus' `ModuleValidator.fix`."""
        with _extras.needed("opacus", extra="opacus", purpose="Replacing layers"):
            from opacus.validators import ModuleValidator
        fixed: nn.Module = ModuleValidator.fix(module)
        cls().validate(module=fixed)
        return fixed
