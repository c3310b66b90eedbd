"""Text on its way into the model and out of it. Called by the engine's threads and by constraints.

tokenizer          the tokenizer of a checkpoint
tokenizer_files    a tokenizer from a folder
gguf_tokenizer/    the tokenizer of a GGUF file
chat               chat templates
forms              which forms of a message a template reads
control_tokens     control tokens that are written out in a message
foreign/           what came with a checkpoint, run or tried in a process of its own
assembler          the text of one output: detokenization and stop strings; the texts of its tokens
detokenizer        tokens to text, incrementally
pieces             the bytes of each token
"""

from petiole.gpu_worker.text.assembler import TextAssembler, TextPiece, TokenTexts
from petiole.gpu_worker.text.tokenizer import Tokenizer
from petiole.gpu_worker.text.tokenizer_files import load_tokenizer

__all__ = ["TextAssembler", "TextPiece", "TokenTexts", "Tokenizer", "load_tokenizer"]
