"""Reads the tower of a checkpoint beside its decoder of text.

A checkpoint may have a configuration of a tower and no tensors of it: then it is a decoder of text. So it is where
a tower is of a form that is not computed, such as a quantised one, or a setting is too small for pictures, which
some models must compute whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.loading import LoadOptions, Model, Reader, read_decoder
from petiole.gpu_worker.models.plan import Attention, ModelPlan
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.frames import clock_videos, grid_videos, no_videos
from petiole.gpu_worker.models.vision.gemma_pictures import budget_pictures, square_pictures
from petiole.gpu_worker.models.vision.pictures import ResizedPictures, grid_pictures
from petiole.gpu_worker.models.vision.row_pictures import row_pictures
from petiole.gpu_worker.models.vision.seeing import SeeingDecoder
from petiole.gpu_worker.models.vision.tile_pictures import tile_pictures
from petiole.gpu_worker.models.vision.tower import Tower
from petiole.gpu_worker.models.vision.tower_weights import (
    TowerReader,
    read_gemma3,
    read_gemma4,
    read_pixtral,
    read_qwen,
    read_smolvlm,
)
from petiole.gpu_worker.models.vision.writing import Writing, row_ends, smol_tiles
from petiole.gpu_worker.models.weights.copying import Storage, TensorSource
from petiole.gpu_worker.request.prepared_images import ImageLimits
from petiole.gpu_worker.request.videos import Videos

log = logging.getLogger(__name__)

MOST_IMAGES = 1024
"""In a prompt: more do not fit into any context."""
MOST_PATCHES = 4096
"""In an encode step: four at 512 x 512, say. Those who wait for their next token wait for it."""


@dataclass(frozen=True, slots=True)
class Sight:
    """How the towers of some families are read. first: the name of a tensor that every such tower has, behind one
    of the prefixes in `Names.tower`. pictures: from the tower and what the files say of pictures. writing: what
    stands between features. videos: from the same and the pictures."""

    first: str
    read: Callable[[TowerReader], Tower]
    pictures: Callable[[TowerConfig, Mapping[str, Any]], ResizedPictures]
    writing: Callable[[NamedTokens], Writing] | None = None
    videos: Callable[[TowerConfig, ResizedPictures, Mapping[str, Any]], Videos | None] = no_videos


QWEN = Sight("patch_embed.proj.weight", read_qwen, grid_pictures, videos=grid_videos)
GEMMA3 = Sight("embeddings.patch_embedding.weight", read_gemma3, square_pictures)
PIXTRAL = Sight("patch_conv.weight", read_pixtral, row_pictures, row_ends)
SMOLVLM = Sight("embeddings.patch_embedding.weight", read_smolvlm, tile_pictures, smol_tiles)
GEMMA4 = Sight("patch_embedder.input_proj.weight", read_gemma4, budget_pictures, videos=clock_videos)


def with_eyes(of: Callable[[JsonObject, ModelPlan], TowerConfig], sight: Sight = QWEN) -> Reader:
    """The `Reader` of a family. of: the dimensions of its tower, from config.json and the plan of its text."""

    def read(source: TensorSource, model: Model, options: LoadOptions) -> Decoder:
        return _read(source, model, options, of, sight)

    return read


def _read(
    source: TensorSource,
    model: Model,
    options: LoadOptions,
    of: Callable[[JsonObject, ModelPlan], TowerConfig],
    sight: Sight,
) -> Decoder:
    text = read_decoder(source, model, options)
    prefix = next((one for one in model.names.tower if one + sight.first in source), None)
    if prefix is None or "vision_config" not in model.raw:
        return text
    try:
        config = of(model.raw, model.plan)
        if sight.writing is not None:
            assert model.tokens is not None  # of a model that is read from files
            config = replace(config, writing=_written(sight.writing(model.tokens), model.plan.vocab_size))
        pictures = sight.pictures(config, model.pictures or {})
        plain = replace(options, quantization="none", max_positions=pictures.longest)
        eyes = TowerReader(source, config, plain, prefix, pictures.values())
        sight.read(replace(eyes, options=replace(plain, device=torch.device("meta"), storage=Storage())))
    except ModelError as error:
        return _without_eyes(text, options, str(error))
    limits = ImageLimits(
        MOST_IMAGES,
        pictures.max_positions,
        MOST_PATCHES,
        bidirectional=any(isinstance(one, Attention) and one.mask == "prefix" for one in model.plan.mixers),
        placeholder=config.placeholder,
        patches=config.merge**2,
        written=config.written,
        boxes=config.boxes,
    )
    videos = _videos(sight, config, pictures, model, options)
    if (small := limits.too_small(options.sizes)) is not None:
        return _without_eyes(text, options, "{} is below {}".format(*small))
    with torch.no_grad():
        tower = sight.read(eyes)
        if config.writing is not None:
            tokens = config.writing.tokens
            between = options.empty((len(tokens), config.outputs))
            if options.device.type != "meta":
                between.copy_(text.embed(torch.tensor(tokens, device=options.device)))
            tower = replace(tower, between=between)
    return SeeingDecoder.around(text, vision=tower, images=limits, pictures=pictures, videos=videos)


def _videos(
    sight: Sight, config: TowerConfig, pictures: ResizedPictures, model: Model, options: LoadOptions
) -> Videos | None:
    try:
        return sight.videos(config, pictures, model.pictures or {})
    except ModelError as error:
        if options.device.type != "meta":
            log.info("videos are refused: %s", error)
        return None


def _written(writing: Writing, vocab_size: int) -> Writing:
    """Raises ModelError for a token without an embedding."""
    if (largest := max(writing.tokens)) >= vocab_size:
        limit = f"must be below {vocab_size}, the tokens of the text"
        raise ModelError(f"tokenizer.json: the id of a token inside pictures {limit}, got {largest}")
    return writing


def _without_eyes(text: Decoder, options: LoadOptions, why: str) -> Decoder:
    if options.device.type != "meta":  # which comes before, and does not read
        log.info("pictures are refused: %s", why)
    return text
