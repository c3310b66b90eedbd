"""The dimensions of a Moondream 2, from its config.json or, as in the releases, from the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    JsonObject,
    objects,
    shown,
    whole,
)
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.models.plan import MAX_POSITION, Attention, FeedForward, Layer, ModelPlan, Norm, Rotary

ARCHITECTURES = ("Moondream", "HfMoondream")
HEAD_DIM, ROTARY_DIM = 64, 32
"""Fixed in the family: the size of the text decoder's heads, and how much of each head is rotated."""

_MAX_SIDE, _MAX_CROPS = 4096, 64
"""Pixels of a crop's side, and crops of a picture: limits far above the family's."""

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
    given = objects(raw, "config")
    try:
        return _parse(raw, *(dict(objects(given, part)) for part in ("text", "vision", "region", "tokenizer")))
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"config.json of a Moondream makes no sense: {error}") from error


def _parse(
    raw: JsonObject, text: dict[str, Any], vision: dict[str, Any], region: dict[str, Any], tokens: dict[str, Any]
) -> MoondreamConfig:
    dim, heads = whole(text, "dim", MAX_WIDTH, 2048), whole(text, "n_heads", MAX_WIDTH, 32)
    if dim != heads * HEAD_DIM:
        raise ModelError(f"config.json: dim must be {HEAD_DIM} for each of {heads} heads, got {dim}")
    if any(part.get("group_size") is not None for part in (text, region)):
        raise ModelError("config.json: weights that are quantised already (group_size) are not read")
    kv_heads = whole(text, "n_kv_heads", MAX_WIDTH, heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: n_kv_heads must divide {heads} heads, got {kv_heads}")
    layers, known = whole(text, "n_layers", MAX_LAYERS, 24), TokenConfig()
    encoder, encoder_heads = whole(vision, "enc_dim", MAX_WIDTH, 1152), whole(vision, "enc_n_heads", MAX_WIDTH, 16)
    if encoder % encoder_heads:
        raise ModelError(f"config.json: enc_n_heads must divide {encoder}, enc_dim, got {encoder_heads}")
    bins = whole(region, "coord_out_dim", MAX_WIDTH, 1024, low=2)
    if whole(region, "size_out_dim", 2 * MAX_WIDTH, 2 * bins) != 2 * bins:
        raise ModelError(f"config.json: size_out_dim must be {2 * bins}, got {region['size_out_dim']}")
    vocab = whole(text, "vocab_size", MAX_VOCAB, 51200)

    def token(key: str, default: int) -> int:
        return whole(tokens, key, vocab - 1, default, low=0)

    mixer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        rotary=Rotary(ROTARY_DIM),
        mask="prefix",
        qkv_bias=True,
        out_bias=True,
    )
    fed = FeedForward(whole(text, "ff_dim", 2 * MAX_WIDTH, 8192), "gelu_tanh", gated=False, bias=True)
    return MoondreamConfig(
        text=ModelPlan(
            architecture="Moondream",
            vocab_size=vocab,
            hidden_size=dim,
            layers=(Layer(mixer, fed, mixer_norm=NORM, parallel=True),) * layers,
            norm=NORM,
            max_position=whole(text, "max_context", MAX_POSITION, 2048),
            head_bias=True,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
            eos_token_ids=(token("eos_id", known.eos),),
        ),
        vision=VisionConfig(
            dim=encoder,
            heads=encoder_heads,
            layers=whole(vision, "enc_n_layers", MAX_LAYERS, 27),
            ff=whole(vision, "enc_ff_dim", 2 * MAX_WIDTH, 4304),
            projection=whole(vision, "proj_inner_dim", 2 * MAX_WIDTH, 8192),
            geometry=_geometry(vision),
        ),
        region=RegionConfig(
            coordinate_features=whole(region, "coord_feat_dim", MAX_WIDTH, 256),
            size_features=whole(region, "size_feat_dim", MAX_WIDTH, 512),
            inner=whole(region, "inner_dim", 2 * MAX_WIDTH, 8192),
            bins=bins,
        ),
        tokens=TokenConfig(
            bos=token("bos_id", known.bos),
            eos=token("eos_id", known.eos),
            answer=token("answer_id", known.answer),
            thinking=token("thinking_id", known.thinking),
            coordinate=token("coord_id", known.coordinate),
            size=token("size_id", known.size),
            points=token("start_ground_points_id", known.points),
            points_end=token("end_ground_id", known.points_end),
            templates=_templates(tokens.get("templates", known.templates)),
        ),
    )


def _geometry(vision: JsonObject) -> CropGeometry:
    """Raises ModelError for crops that nobody could hold."""
    patch, side = whole(vision, "enc_patch_size", _MAX_SIDE, 14), whole(vision, "crop_size", _MAX_SIDE, 378)
    if side % patch:
        raise ModelError(f"config.json: crop_size must be a multiple of {patch}, got {side}")
    grid, crops = side // patch, whole(vision, "max_crops", _MAX_CROPS, 12)
    margin = whole(vision, "overlap_margin", max(0, (grid - 1) // 2), 4, low=0)
    return CropGeometry(patch, grid, margin, crops)


def _templates(given: object) -> Mapping[str, Mapping[str, list[int]]]:
    """Raises ModelError for others than lists of tokens under the names of the release."""
    for skill, parts in TokenConfig().templates.items():
        found = given.get(skill) if isinstance(given, Mapping) else None
        for name in parts:
            ids = found.get(name) if isinstance(found, Mapping) else None
            if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < MAX_VOCAB for one in ids):
                limit = f"must be a list of token ids from 0 to {MAX_VOCAB - 1}"
                raise ModelError(f"config.json: templates.{skill}.{name} {limit}, got {shown(ids)}")
    return given  # type: ignore[return-value]
