"""Text on its way into the model and out of it: tokenizer, chat templates, incremental text, stop strings."""

from gpu_worker.text.loading import load_tokenizer
from gpu_worker.text.stream import TextPiece, TextStream
from gpu_worker.text.tokenizer import Tokenizer

__all__ = ["TextPiece", "TextStream", "Tokenizer", "load_tokenizer"]
