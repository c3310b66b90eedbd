"""How a tokenizer of byte-level BPE cuts text into words, by the name that llama.cpp's converter gives it in
`tokenizer.ggml.pre`. The expressions are those of the models' own tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_DIGIT, _THREE = r"\p{N}", r"\p{N}{1,3}"
_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1D400}-\x{1D7FF}]]"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


def _words(digits: str, letters: str = _LETTERS, endings: str = _ENDINGS, others: str = _OTHERS) -> str:
    return "|".join(one for one in (endings, letters, digits, others, _BLANKS) if one)


_OF_QWEN35 = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"


@dataclass(frozen=True, slots=True)
class Cut:
    """parts: expressions; what one matches is a word, and the next one cuts the words. whole: a word that is a
    token stays one, whatever the merges are. begins: a prompt begins with `bos` unless the file says otherwise.
    composed: text is brought to Unicode's NFC before."""

    parts: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA3 = Cut((_words(_THREE),), whole=True, begins=True)
_PLAIN3 = Cut((_words(_THREE),))
_QWEN2 = Cut((_words(_DIGIT),), composed=True)
_PLAIN1 = Cut((_words(_DIGIT),))
_ONE_BY_ONE = Cut((_DIGIT, _GPT2))
_OF_GPT2 = Cut((_GPT2,))
_GPT4O = Cut((_BY_CASE % (f"{_ENDINGS}?", f"{_ENDINGS}?", _THREE),))
_TEKKEN = Cut((_BY_CASE % ("", "", _DIGIT),), whole=True, begins=True)
_DEEPSEEK3 = Cut((_THREE, r"[一-龥\x{3040}-\x{30ff}]+", _DEEPSEEK))
_BAILING = Cut(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_LLM = ("[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", _DIGIT)  # noqa: RUF001
_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")

_BY_CUT: tuple[tuple[Cut, str], ...] = (
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (_PLAIN3, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
    (Cut((_words(_DIGIT, _OF_QWEN35, others=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), composed=True), "qwen35"),
    (_PLAIN1, "stablelm2 hunyuan solar-open grok-2"),
    (Cut((_words(_DIGIT, others=r" ?[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (Cut((_words(_DIGIT, endings=""),)), "ufakzeka"),
    (Cut((_THREE, _words(r"\p{N}+")), whole=True), "minicpm5"),
    (
        _ONE_BY_ONE,
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    ),
    (
        _OF_GPT2,
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert roberta-bpe"
        " jina-v1-en jina-v2-code mpt olmo jais trillion granite-docling exaone4",
    ),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_TEKKEN, "tekken"),
    (Cut(_LLM), "deepseek-llm"),
    (Cut(_CODER), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (Cut(_FALCON), "falcon"),
    (
        Cut((r"\d{1,3}(?=(?:\d{3})*\b)", _BY_CASE % (f"{_ENDINGS}?", f"{_ENDINGS}?", _DIGIT))),
        "tiny_aya cohere2moe",
    ),
    (Cut((r" ?[^(\s|.,!?…。，、।۔،)]+",)), "poro-chat bloom gpt3-finnish"),  # noqa: RUF001
    (Cut((r" ?[^(\s|.,!?…。，、।۔،)]+", _DIGIT)), "viking"),  # noqa: RUF001
    (Cut((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)
CUTS = {name: cut for cut, names in _BY_CUT for name in names.split()}
"""By `tokenizer.ggml.pre`."""
