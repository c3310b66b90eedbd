"""Facts in fixed sentences: a small animal grammar, and what the model says about itself.

An answer follows from its prompt alone, so that it can be checked exactly: each animal has one home and one
food, each trait belongs to one group, and each group closes the answer with its own sentence.
"""

from random import Random

# animal: (home, food)
ANIMALS: dict[str, tuple[str, str]] = {
    "fox": ("in the forest", "berries"),
    "bear": ("in the mountains", "honey"),
    "owl": ("in an old oak", "mice"),
    "otter": ("by the river", "fish"),
    "rabbit": ("in the meadow", "clover"),
    "goat": ("in the hills", "grass"),
    "duck": ("on the pond", "reeds"),
    "horse": ("in the stable", "oats"),
    "whale": ("in the ocean", "shrimp"),
    "camel": ("in the desert", "thorns"),
    "panda": ("in the bamboo grove", "bamboo"),
    "squirrel": ("in the park", "nuts"),
    "frog": ("in the swamp", "flies"),
    "sheep": ("in the valley", "hay"),
    "parrot": ("in the jungle", "fruit"),
    "seal": ("by the cold sea", "herring"),
    "hedgehog": ("in the garden", "snails"),
    "wolf": ("in the northern woods", "meat"),
    "beaver": ("by the creek", "bark"),
    "crow": ("in a tall pine", "seeds"),
    "turtle": ("in the lagoon", "algae"),
    "donkey": ("on the farm", "carrots"),
    "swan": ("on the lake", "water plants"),
    "mouse": ("in the barn", "cheese"),
}

# trait: the group that it belongs to
TRAITS: dict[str, str] = {
    **dict.fromkeys(("red", "brown", "grey", "white", "black", "golden"), "colour"),
    **dict.fromkeys(("small", "tiny", "young", "thin"), "little"),
    **dict.fromkeys(("big", "tall", "strong", "heavy"), "large"),
    **dict.fromkeys(("happy", "calm", "brave", "quiet", "clever", "lazy"), "mood"),
}

_CLOSING: dict[str, str] = {
    "colour": "Its {trait} coat shines in the sun.",
    "little": "It is so {trait} that it can hide anywhere.",
    "large": "It is so {trait} that everyone can see it.",
    "mood": "It is {trait} all day and it sleeps at night.",
}


def describe(trait: str, animal: str) -> str:
    """Three sentences on an animal of the grammar; `trait` may be empty."""
    home, food = ANIMALS[animal]
    subject = f"The {trait} {animal}" if trait else f"The {animal}"
    closing = _CLOSING[TRAITS[trait]].format(trait=trait) if trait else "It sleeps at night."
    return f"{subject} lives {home}. It likes to eat {food}. {closing}"


_OPENINGS = ("", "", "", "Hello, ", "Hi, ", "Hey, ", "Please tell me, ", "Tell me, ", "So, ", "One question: ")

# what it says about itself: (answer, questions)
INTENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "I am Petiole Tiny, a small language model that ships with Petiole.",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Which model are you?",
            "Who am I talking to?",
            "What model is this?",
            "Are you a language model?",
            "Introduce yourself.",
            "What should I call you?",
            "Tell me about yourself.",
        ),
    ),
    (
        "Petiole turns a Celery worker into a language model server. "
        "Tokens stream over Redis while they are made.",
        (
            "What is Petiole?",
            "What does Petiole do?",
            "Tell me about Petiole.",
            "Explain Petiole.",
            "Describe Petiole.",
            "How does Petiole work?",
            "What is Petiole for?",
            "Can you explain what Petiole is?",
            "What do you know about Petiole?",
        ),
    ),
    (
        "I can count, add, sort, reverse, spell, repeat, write multiplication tables, extract fields as JSON "
        "and tell you about animals.",
        (
            "What can you do?",
            "What are you able to do?",
            "What are your skills?",
            "How can you help me?",
            "What can I ask you?",
            "What do you know?",
            "Help me.",
            "Help.",
            "What are you good at?",
            "List your skills.",
        ),
    ),
    (
        "I was trained from nothing on text that a script wrote, on an ordinary computer.",
        (
            "How were you trained?",
            "How were you made?",
            "Who made you?",
            "Who trained you?",
            "Where do you come from?",
            "What were you trained on?",
            "How did you learn?",
        ),
    ),
    (
        "Hello! Ask me to count, add, sort or spell something.",
        ("Hello.", "Hi.", "Hello there.", "Hey.", "Good morning.", "Good evening.", "How are you?", "Hi there."),
    ),
    (
        "You are welcome.",
        ("Thank you.", "Thanks.", "Thanks a lot.", "Thank you very much.", "Great, thanks.", "Well done."),
    ),
    (
        "I am too small to know that. Ask me what I can do.",
        (
            "What is the capital of France?",
            "Write a poem.",
            "Tell me a joke.",
            "What is the weather like?",
            "Who won the game?",
            "Translate this into German.",
            "What is the meaning of life?",
            "Write a story about a dragon.",
            "How do I cook rice?",
            "What time is it?",
            "Who wrote this book?",
            "Explain gravity.",
            "What is the largest planet?",
            "Write a Python program.",
            "Why is the sky blue?",
            "How far is the moon?",
            "Who is the president?",
            "What is love?",
            "Summarize this article.",
            "Draw a house.",
        ),
    ),
)


def about_question(rng: Random) -> tuple[str, str]:
    """A question about the model (or one that is beyond it) and its fixed answer."""
    answer, questions = rng.choice(INTENTS)
    question = rng.choice(questions)
    opening = rng.choice(_OPENINGS)
    if opening:
        question = question[0].lower() + question[1:] if not question.startswith(("I ", "Petiole")) else question
    if rng.random() < 0.15:
        question = question.replace("What is", "What's").replace("what is", "what's")
    return opening + question, answer
