"""The dimensions of a Moondream 2, from its config.json or, as in the releases, from the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary

ARCHITECTURES = ("Moondream", "HfMoondream")
HEAD_DIM, ROTARY_DIM = 64, 32
"""Fixed in the family: the size of the text decoder's heads, and how much of each head is rotated."""

NORM = Norm(kind="layer", eps=1e-5, bias=True)
"""The norm of the decoder of text and of the encoder."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    dim: int = 1152
    heads: int = 16
    layers: int = 27
    ff: int = 4304
    projection: int = 8192
    geometry: CropGeometry = field(default_factory=CropGeometry)

    @property
    def plan(self) -> tuple[Layer, ...]:
        """The layers of the encoder: all positions of a crop see each other."""
        width = self.dim // self.heads
        layer = Layer(
            mixer=Attention(
                self.heads, self.heads, width, width**-0.5, mask="bidirectional", qkv_bias=True, out_bias=True
            ),
            feed_forward=FeedForward(self.ff, "gelu_tanh", gated=False, bias=True),
            mixer_norm=NORM,
            feed_forward_norm=NORM,
        )
        return (layer,) * self.layers


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """coordinate_features, size_features: twice the number of frequencies. bins: how many a coordinate or side
    has."""

    coordinate_features: int = 256
    size_features: int = 512
    inner: int = 8192
    bins: int = 1024


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """Ids of the tokens with a special meaning, and the templates of the skills."""

    bos: int = 0
    eos: int = 0
    answer: int = 3
    thinking: int = 4
    coordinate: int = 5
    size: int = 6
    points: int = 7
    points_end: int = 9
    templates: Mapping[str, Mapping[str, list[int]]] = field(
        default_factory=lambda: {
            "caption": {
                "short": [1, 32708, 2, 12492, 3],
                "normal": [1, 32708, 2, 6382, 3],
                "long": [1, 32708, 2, 4059, 3],
            },
            "query": {"prefix": [1, 15381, 2], "suffix": [3]},
            "detect": {"prefix": [1, 7235, 476, 2], "suffix": [3]},
            "point": {"prefix": [1, 2581, 2], "suffix": [3]},
        }
    )


@dataclass(frozen=True, slots=True)
class MoondreamConfig:
    """text: the plan of the decoder of text."""

    text: ModelPlan
    vision: VisionConfig = field(default_factory=VisionConfig)
    region: RegionConfig = field(default_factory=RegionConfig)
    tokens: TokenConfig = field(default_factory=TokenConfig)


def text_plan(raw: JsonObject) -> ModelPlan:
    return parse_moondream_config(raw).text


def parse_moondream_config(raw: JsonObject) -> MoondreamConfig:
    """Parse a configuration with the names of the reference implementation: `config` with `text`, `vision`,
    `region` and `tokenizer`. Missing values are those of the release. Raises ModelError."""
    given = raw.get("config") or {}
    try:
        return _parse(raw, *({**(given.get(part) or {})} for part in ("text", "vision", "region", "tokenizer")))
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"config.json of a Moondream makes no sense: {error!r}") from error


def _parse(
    raw: JsonObject, text: dict[str, Any], vision: dict[str, Any], region: dict[str, Any], tokens: dict[str, Any]
) -> MoondreamConfig:
    dim, heads = int(text.get("dim", 2048)), int(text.get("n_heads", 32))
    if dim != heads * HEAD_DIM:
        raise ModelError(f"config.json: dim must be {HEAD_DIM} for each of {heads} heads, got {dim}")
    if any(part.get("group_size") is not None for part in (text, region)):
        raise ModelError("config.json: weights that are quantised already (group_size) are not read")
    layers, known = int(text.get("n_layers", 24)), TokenConfig()
    patch = int(vision.get("enc_patch_size", 14))
    side = int(vision.get("crop_size", 378))
    if side % patch:
        raise ModelError(f"config.json: crop_size must be a multiple of {patch}, got {side}")
    bins = int(region.get("coord_out_dim", 1024))
    if int(region.get("size_out_dim", 2 * bins)) != 2 * bins:
        raise ModelError(f"config.json: size_out_dim must be {2 * bins}, got {region['size_out_dim']}")
    mixer = Attention(
        heads=heads,
        kv_heads=int(text.get("n_kv_heads", heads)),
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        rotary=Rotary(ROTARY_DIM),
        mask="prefix",
        qkv_bias=True,
        out_bias=True,
    )
    fed = FeedForward(int(text.get("ff_dim", 8192)), "gelu_tanh", gated=False, bias=True)
    return MoondreamConfig(
        text=ModelPlan(
            architecture="Moondream",
            vocab_size=int(text.get("vocab_size", 51200)),
            hidden_size=dim,
            layers=(Layer(mixer, fed, mixer_norm=NORM, parallel=True),) * layers,
            norm=NORM,
            max_position=int(text.get("max_context", 2048)),
            head_bias=True,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
            eos_token_ids=(int(tokens.get("eos_id", known.eos)),),
        ),
        vision=VisionConfig(
            dim=int(vision.get("enc_dim", 1152)),
            heads=int(vision.get("enc_n_heads", 16)),
            layers=int(vision.get("enc_n_layers", 27)),
            ff=int(vision.get("enc_ff_dim", 4304)),
            projection=int(vision.get("proj_inner_dim", 8192)),
            geometry=CropGeometry(
                patch=patch,
                grid=side // patch,
                margin=int(vision.get("overlap_margin", 4)),
                max_crops=int(vision.get("max_crops", 12)),
            ),
        ),
        region=RegionConfig(
            coordinate_features=int(region.get("coord_feat_dim", 256)),
            size_features=int(region.get("size_feat_dim", 512)),
            inner=int(region.get("inner_dim", 8192)),
            bins=bins,
        ),
        tokens=TokenConfig(
            bos=int(tokens.get("bos_id", known.bos)),
            eos=int(tokens.get("eos_id", known.eos)),
            answer=int(tokens.get("answer_id", known.answer)),
            thinking=int(tokens.get("thinking_id", known.thinking)),
            coordinate=int(tokens.get("coord_id", known.coordinate)),
            size=int(tokens.get("size_id", known.size)),
            points=int(tokens.get("start_ground_points_id", known.points)),
            points_end=int(tokens.get("end_ground_id", known.points_end)),
            templates=tokens.get("templates", known.templates),
        ),
    )
