"""The words that skills are about, and made-up ones, so that copying is learnt and not a list.

A content word is always spelt in letters by the tokenizer; a frame word ("count", "from") is one token.
Only repeating draws frame words too: their letters are out of the model's sight.
"""

from random import Random

_WORDS_TEXT = """
    acorn anchor ant apple apron arrow badge bagel banana barn basil basket beach beacon bean bear beaver bell
    berry bicycle bird biscuit blanket boat bottle branch brass bread breeze brick bridge brook broom brush
    bubble bucket butter button cabin cactus camel camera candle canoe canvas carpet carrot castle cat cedar
    chair chalk cheese cherry chess circle clay cliff clock cloud clover coast coat cobweb coffee comet compass
    copper coral cotton cow crane crayon creek cricket crow crown cup curtain daisy dawn deer desert diamond
    dog dolphin donkey door dove dragon drum duck dust eagle ear egg elbow elm engine fabric falcon farm
    feather fence fern ferry fiddle field fig finch fire fish flag flame flute fog forest fork fox frog frost
    garden garlic gate ginger glacier glass glove goat gold goose grape grass gravel guitar hammer harbor hare
    harp hat hawk hay hazel heron hill hive honey hood horse house ice ink iron island ivy jacket jam jar
    jewel juice jungle kayak kettle key king kite kitten knee ladder lagoon lake lamb lamp lantern lark leaf
    lemon lentil letter lily lime linen lion lizard lobster locket lotus magnet mango maple marble market
    meadow melon milk mill mint mirror mist mole moon moss moth motor mouse mud museum mustard nail napkin
    needle nest nickel night noodle north nut oak oasis oat ocean olive onion orange orchid otter oven owl
    oyster paddle paint palm pan panda paper parade parrot path pea peach pear pearl pebble pencil pepper
    piano pickle pillow pine planet plum pocket pony poppy potato prairie pumpkin puzzle quail quartz queen
    quill quilt rabbit radish rain raven reed ribbon rice ring river robin rocket roof rope rose rug sail
    salad salmon salt sand scarf school seal seed shadow sheep shell shield ship shoe silver sky sled snail
    snow soap sock soup spark sparrow spider spoon spring squirrel star steam stone stork storm straw stream
    sugar summer sun swan tail tea temple tent thistle thread thunder tiger timber toad tomato torch tower
    trail train tree trout trumpet tulip tunnel turnip turtle umbrella valley velvet vessel village vine
    violet violin wagon walnut wave wax weasel whale wheat wheel whistle willow wind window winter wolf wool
    wren yarn yogurt zebra zinc
"""
WORDS = tuple(_WORDS_TEXT.split())

_NAMES_TEXT = """
    Ada Adam Aiko Alan Ali Amir Ana Anna Arun Bea Ben Bruno Carla Carlos Chen Clara Dan David Diana Elena Eli
    Emil Emma Eric Eva Fatima Felix Finn Flora Frank Grace Greta Hana Hugo Ida Igor Ines Iris Ivan Jan Jane
    Joao John Jonas Julia Karl Kate Kenji Kofi Lara Lars Laura Lea Leo Lily Linda Lucas Lucia Luis Maria Marco
    Mark Marta Max Maya Mei Mila Mina Mona Nadia Nina Noah Nora Oleg Olga Omar Oscar Paul Pedro Peter Petra
    Priya Rafael Ravi Rita Rosa Ruth Sam Sara Sofia Sonia Stefan Tara Theo Thomas Tim Tomas Uma Vera Victor
    Wei Yara Yuki Yusuf Zara Zoe
"""
NAMES = tuple(_NAMES_TEXT.split())

_CITIES_TEXT = """
    Accra Amman Ankara Athens Austin Basel Beirut Bergen Berlin Bern Bogota Boston Bristol Cairo Calgary
    Chicago Cologne Dakar Dallas Delhi Denver Dhaka Dublin Florence Geneva Genoa Ghent Hamburg Hanoi Havana
    Helsinki Houston Istanbul Jakarta Kigali Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon Madrid Malmo
    Manila Miami Milan Montreal Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Oxford Paris Perth Porto
    Prague Quito Riga Rome Santiago Seattle Seoul Seville Sofia Sydney Tallinn Tampere Tokyo Toronto Tunis
    Turin Utrecht Valencia Vienna Vilnius Warsaw York Zagreb Zurich
"""
CITIES = tuple(_CITIES_TEXT.split())

_FRAME_WORDS_TEXT = """
    add after age and animal answer city count down eat extract first for from how in into is list lives me
    name number numbers of order please repeat reverse rows sort spell sum table tell that the these this
    times to up what who with word words write you
"""
FRAME_WORDS = tuple(_FRAME_WORDS_TEXT.split())

_VOWELS = "aaaeeeeiioou"
_CONSONANTS = "bbccddffgghhjkkllllmmmnnnnpprrrrssssttttvwxyz"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made_up_word(rng: Random, low: int = 3, high: int = 8) -> str:
    """A word of `low` to `high` letters that no list holds: mostly pronounceable, sometimes any letters."""
    length = rng.randint(low, high)
    if rng.random() < 0.2:
        return "".join(rng.choice(_LETTERS) for _ in range(length))
    vowel = rng.random() < 0.4
    letters: list[str] = []
    while len(letters) < length:
        letters.append(rng.choice(_VOWELS if vowel else _CONSONANTS))
        vowel = not vowel if rng.random() < 0.85 else vowel
    return "".join(letters)


def content_word(rng: Random) -> str:
    """A lower-case word that the tokenizer spells in letters: half from the list, half made up."""
    return rng.choice(WORDS) if rng.random() < 0.5 else made_up_word(rng)


def any_word(rng: Random) -> str:
    """A content word, or now and then a frame word."""
    return rng.choice(FRAME_WORDS) if rng.random() < 0.05 else content_word(rng)


def any_name(rng: Random, known: tuple[str, ...]) -> str:
    """A capitalised proper name: half from `known`, half made up."""
    return rng.choice(known) if rng.random() < 0.5 else made_up_word(rng).capitalize()
