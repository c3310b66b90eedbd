"""The tokenizer: WordPiece of lower-case text, as BERT's, counted in generated text. The shipped one is frozen,
since the ids in the weights depend on it."""

import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from training.embed.pairs import DRAWS, draw, graded

VOCAB_SIZE = 4096
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP = 0, 2, 3
MAX_TOKENS = 256
_PRINTABLE = [chr(code) for code in (*range(33, 127), *range(161, 383), 0x20AC)]
"""Other characters are unknown, unless generated text has them."""


def build(seed: int = 1, n_texts: int = 24_000) -> Tokenizer:
    rng, texts = Random(seed), list[str]()
    while len(texts) < n_texts:
        pair = draw(rng.choice(list(DRAWS)), rng, "train")
        alike = graded(rng, "train")
        texts += [f"query: {pair.one}", f"passage: {pair.two}", alike.one]
    tokenizer = Tokenizer(models.WordPiece(vocab={}, unk_token=SPECIAL[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=_PRINTABLE,
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing((SPECIAL[SEP], SEP), (SPECIAL[CLS], CLS))
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "model_max_length": MAX_TOKENS,
        "pad_token": SPECIAL[PAD],
        "unk_token": SPECIAL[1],
        "cls_token": SPECIAL[CLS],
        "sep_token": SPECIAL[SEP],
        "mask_token": SPECIAL[4],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
