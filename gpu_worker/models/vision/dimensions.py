"""The dimensions of a tower, and its layers as a plan."""

from __future__ import annotations

from dataclasses import dataclass

from petiole.gpu_worker.models.plan import ModelPlan, Norm
from petiole.gpu_worker.models.vision.writing import Writing
from petiole.gpu_worker.request.prepared_images import Written


@dataclass(frozen=True, slots=True)
class VideoMarks:
    """Of videos in text. mark: see `Videos`. around: the tokens before and behind each image, where its time is
    text; None: time is a position. per_second: positions of a second."""

    mark: int
    around: tuple[int, int] | None = None
    per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """plan: the layers. patch: pixels of a patch's side. merge: patches of the side of a block, which becomes
    one position. frames: pictures in a patch. table: rows and columns of the table of learned positions; 0:
    there is none. taps: behind which layers the features are taken that the decoder of text adds behind its
    first ones. window: blocks of the side of a window, whose patches see each other; 0: all patches of a
    picture do. whole: the layers for which there are no windows. outputs: the width of features. norm: of the
    merger. placeholder: the token that stands for a picture among tokens. written: how a picture is written in
    text, if not as that token alone. boxes: see `ImageLimits`. clipped: whether products have bounds. standard:
    whether features are brought to one scale. writing: what stands between features. biased: whether the
    products of the merger have biases. edge: the most pixels of a picture's longer side, where no file says how
    pictures are made ready. video: None: there are no videos."""

    plan: ModelPlan
    patch: int
    merge: int
    frames: int
    outputs: int
    placeholder: int
    norm: Norm
    table: int = 0
    taps: tuple[int, ...] = ()
    window: int = 0
    whole: tuple[int, ...] = ()
    written: Written | None = None
    boxes: int | None = None
    clipped: bool = False
    standard: bool = False
    writing: Writing | None = None
    biased: bool = False
    edge: int = 0
    video: VideoMarks | None = None

    @property
    def hidden(self) -> int:
        return self.plan.hidden_size

    @property
    def block(self) -> int:
        """Pixels of the side of a block."""
        return self.patch * self.merge
