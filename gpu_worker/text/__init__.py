"""Text on its way into the model and out of it. Called by the engine's threads and by constraints.

tokenizer    the tokenizer of a checkpoint
loading      a tokenizer from a folder
gguf         the tokenizer of a GGUF file
chat         chat templates
forms        which forms of a message a template reads
control      control tokens that are written out in a message
sandbox      renders chat templates in a process of their own
_template_process  limits itself; started by `sandbox` as a script
checks       text and data of a request, checked
assembler    the text of one output: detokenization and stop strings; the texts of its tokens
detokenizer  tokens to text, incrementally
stops        stop strings, matched incrementally
pieces       the bytes of each token
"""

from petiole.gpu_worker.text.assembler import Spelling, TextAssembler, TextPiece
from petiole.gpu_worker.text.loading import load_tokenizer
from petiole.gpu_worker.text.tokenizer import Tokenizer

__all__ = ["Spelling", "TextAssembler", "TextPiece", "Tokenizer", "load_tokenizer"]
