"""The tokenizer: a word of the frame is one token, everything else is one token a byte.

Spelling, reversing and sorting need letters, so a BPE merge inside "lantern" would hurt; fixed sentences need
few tokens, so "multiplication" should not cost fourteen. Both at once: a byte-level BPE *without merges* and
with `ignore_merges`, where a pre-token that is in the vocabulary is one token and any other falls to its bytes.
The 256 bytes are all there, so that any UTF-8 text survives the round trip.

The whole pieces stand in `pieces.txt`: the most frequent pre-tokens of a generated sample, content words left
out. The list is frozen, since the ids in the weights depend on it.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training.text import dialogue

VOCAB_SIZE = 512
CONTEXT = 2048

# digits one by one; " x " and ", " of the answers; words with their space; runs of punctuation; white space
SPLIT = r" x (?=[0-9])|[0-9]| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s|\p{N}"
PIECES = Path(__file__).with_name("pieces.txt")
SPECIAL = (dialogue.END_OF_TEXT, dialogue.IM_START, dialogue.IM_END)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(VOCAB_SIZE - 3, VOCAB_SIZE)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def frame_pieces() -> list[str]:
    """The whole pieces, in byte-level letters ("Ġ" is a space; the file writes "_")."""
    return [piece.replace("_", "Ġ") for piece in PIECES.read_text(encoding="utf-8").split()]


def build() -> Tokenizer:
    """The tokenizer, the same on every run."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *frame_pieces()]
    if len(pieces) + len(SPECIAL) != VOCAB_SIZE:
        raise ValueError(f"vocabulary: {VOCAB_SIZE} tokens wanted, {len(pieces) + len(SPECIAL)} found")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def save(folder: Path, chat_template: str = dialogue.CHAT_TEMPLATE) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": dialogue.IM_END,
        "pad_token": dialogue.END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [dialogue.IM_START, dialogue.IM_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
