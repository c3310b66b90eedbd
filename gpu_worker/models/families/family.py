"""What a family is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.class_defaults import completed
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of, shown
from petiole.gpu_worker.models.loading import Model, Reader, read_decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.names import LLAMA, Names


@dataclass(frozen=True, slots=True)
class Family:
    """architectures: as config.json names them. plan: config.json as a plan, completed with the defaults of its
    class in transformers; it may raise KeyError for a key that is missing, and the errors of Python for values
    that make no sense. read: for a family that is more than a decoder of text. by_layer: keys that may differ by
    layer, in `per_layer_config`. sees: whether it reads how pictures are made ready."""

    architectures: tuple[str, ...]
    plan: Callable[[JsonObject], ModelPlan]
    names: Names = LLAMA
    read: Reader = read_decoder
    by_layer: tuple[str, ...] = ()
    sees: bool = False

    def model(self, raw: JsonObject) -> Model:
        """Raises ModelError for what the family cannot compute."""
        name = architecture_of(raw)
        try:
            self._check_layers(raw)
            return Model(raw, self.plan(completed(raw)), self.names, self.read, pictures={} if self.sees else None)
        except KeyError as error:
            raise ModelError(f"config.json of a {name} lacks {shown(error.args[0])}") from None
        except ModelError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ModelError(f"config.json of a {name} makes no sense: {error}") from error

    def _check_layers(self, raw: JsonObject) -> None:
        inner = raw.get("text_config")
        for part in (raw, inner if isinstance(inner, Mapping) else {}):
            given = part.get("per_layer_config")
            layers = given.values() if isinstance(given, Mapping) else ()
            keys = {key for one in layers if isinstance(one, Mapping) for key in one}
            unread = sorted(keys - set(self.by_layer))
            if unread:
                known = " or ".join(self.by_layer) or "empty"
                raise ModelError(f"config.json: per_layer_config must be {known}, got {shown(unread)}")
