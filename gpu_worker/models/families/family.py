"""What a family is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of
from petiole.gpu_worker.models.loading import Model, Reader, read_decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.names import LLAMA, Names


@dataclass(frozen=True, slots=True)
class Family:
    """architectures: as config.json names them. plan: config.json as a plan; it may raise KeyError for a key that
    is missing, and the errors of Python for values that make no sense. read: for a family that is more than a
    decoder of text."""

    architectures: tuple[str, ...]
    plan: Callable[[JsonObject], ModelPlan]
    names: Names = LLAMA
    read: Reader = read_decoder

    def model(self, raw: JsonObject) -> Model:
        """Raises ModelError for what the family cannot compute."""
        name = architecture_of(raw)
        try:
            return Model(raw, self.plan(raw), self.names, self.read)
        except KeyError as error:
            raise ModelError(f"config.json of a {name} lacks {error.args[0]!r}") from None
        except ModelError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ModelError(f"config.json of a {name} makes no sense: {error}") from error
