"""Prompts of the shipped demo chats: our own templates and word lists, combined. Data, with one pure function."""

from __future__ import annotations

import random
import string
from itertools import product

WORDS: dict[str, tuple[str, ...]] = {
    "thing": (
        "a bicycle", "a battery", "a bridge", "a candle", "a clock", "a compass", "a dictionary", "a dishwasher",
        "an elevator", "a fence", "a garden", "a glacier", "a greenhouse", "a hammer", "a kettle", "a ladder",
        "a library", "a lighthouse", "a magnet", "a map", "a microscope", "a mirror", "a museum", "an orchestra",
        "a parachute", "a pencil", "a piano", "a printer", "a refrigerator", "a river", "a sailboat", "a satellite",
        "a telescope", "a thermometer", "a train", "an umbrella", "a volcano", "a windmill",
    ),
    "concept": (
        "gravity", "friction", "photosynthesis", "evaporation", "inflation", "democracy", "recycling", "patience",
        "teamwork", "compound interest", "an algorithm", "a database", "encryption", "biodiversity", "erosion",
        "electricity", "empathy", "a budget", "the water cycle", "an ecosystem", "a metaphor", "a solar eclipse",
        "migration", "nutrition", "probability", "pollination", "renewable energy", "sound", "supply and demand",
        "a vaccine", "vitamin C", "the tide", "a fraction", "curiosity", "a hypothesis", "open source software",
    ),
    "kind": (
        "fruits", "vegetables", "mammals", "birds", "insects", "trees", "flowers", "rivers", "oceans", "planets",
        "countries in Europe", "countries in Asia", "countries in Africa", "musical instruments", "sports", "tools",
        "kitchen utensils", "pieces of furniture", "desserts", "spices", "board games", "programming languages",
        "metals", "colors", "shapes", "languages", "jobs", "hobbies", "types of weather", "types of transport",
        "breakfast foods", "school subjects", "dog breeds", "sea animals", "famous inventions", "types of cheese",
        "drinks", "holidays", "dances", "emotions",
    ),
    "activity": (
        "reading every day", "learning a language", "cooking at home", "walking to work", "keeping a diary",
        "growing herbs", "playing chess", "swimming", "drawing", "volunteering", "getting enough sleep",
        "drinking water", "saving money", "riding a bike", "listening to music", "meditating", "planting trees",
        "traveling by train", "learning to code", "playing the guitar", "stretching in the morning", "sharing books",
    ),
    "task": (
        "study for an exam", "pack for a trip", "clean a kitchen", "plan a birthday party", "stay focused at work",
        "fall asleep faster", "save electricity", "start a small garden", "make new friends", "write a good email",
        "prepare for an interview", "remember names", "learn new words", "take better photos", "keep a desk tidy",
        "reduce food waste", "run a first race", "choose a book", "care for a houseplant", "train a puppy",
    ),
    "occasion": (
        "a friend who moved to a new house", "a teacher who is retiring", "a neighbor who watered the plants",
        "a colleague on the first day at work", "a cousin who passed an exam", "a doctor who was kind",
        "a customer whose parcel is late", "a team that finished a project", "a brother who has a birthday",
        "a librarian who found a rare book", "a coach after a lost game", "a baker who made a cake",
        "a grandmother who sent a scarf", "a friend who is ill", "a classmate who shared notes",
    ),
    "country": (
        "France", "Japan", "Brazil", "Egypt", "Canada", "Italy", "Kenya", "India", "Norway", "Peru", "Spain",
        "Australia", "Germany", "Mexico", "Greece", "Thailand", "Portugal", "Turkey", "Argentina", "Poland",
        "Sweden", "Ireland", "Chile", "Vietnam", "Austria", "Finland", "Morocco", "Cuba", "Hungary", "Denmark",
    ),
    "word": (
        "happy", "brave", "quick", "quiet", "cold", "ancient", "bright", "clever", "difficult", "empty", "gentle",
        "huge", "important", "lazy", "narrow", "polite", "rare", "simple", "strong", "tired", "useful", "wise",
        "angry", "calm", "dark", "early", "fresh", "honest", "loud", "modern",
    ),
    "casual": (
        "gotta go, talk later", "the meeting is moved to friday", "can u send me the file", "sorry im late",
        "thanks a lot for the help", "the printer is broken again", "lets meet at noon", "i dont get this task",
        "pls call me back", "we need more time", "the food was really good", "i cant come tomorrow",
        "your idea is great", "the train was late so i missed it", "dont forget the keys", "i lost my ticket",
    ),
    "sentence": (
        "The cat sleeps on the warm stove.", "She walks to school every morning.", "The old man tells a story.",
        "We eat dinner at seven.", "The children play in the snow.", "He writes a letter to his sister.",
        "The bus stops near the market.", "They build a house by the lake.", "I drink tea in the afternoon.",
        "The dog runs across the field.", "My uncle repairs old radios.", "The baker sells fresh bread.",
    ),
    "name": ("Ada", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena"),
    "item": ("apples", "pencils", "books", "marbles", "stamps", "cookies", "coins", "balloons", "stickers", "seeds"),
    "a": ("12", "15", "18", "20", "24", "27", "30", "36"),
    "b": ("2", "3", "4", "5", "6", "7", "8", "9"),
    "animal": (
        "a fox", "an owl", "a turtle", "a dolphin", "a bee", "an elephant", "a cat", "a crow", "a frog", "a horse",
        "a mouse", "a penguin", "a rabbit", "a spider", "a whale", "a wolf", "a hedgehog", "a lion",
    ),
    "place": (
        "in a quiet forest", "on a small island", "in a busy city", "at the edge of a desert", "under the sea",
        "on a snowy mountain", "in an old library", "near a lighthouse", "in a space station", "on a farm",
    ),
    "product": (
        "a reusable water bottle", "a bakery", "a bike shop", "a weather app", "a language course", "a book club",
        "a community garden", "a wooden toy", "a coffee shop", "a running shoe", "a note-taking app", "a tea brand",
    ),
}  # fmt: skip

TEMPLATES: dict[str, int] = {
    "Explain what {concept} is in one sentence.": 36,
    "What is {concept}? Keep it short.": 36,
    "Explain {concept} to a child in two sentences.": 36,
    "Why is it useful to know about {concept}? Answer in one sentence.": 36,
    "What is {thing} used for?": 38,
    "Describe {thing} in one short sentence.": 38,
    "Who would need {thing}, and why? One sentence, please.": 38,
    "Define the word '{word}' and use it in a sentence.": 30,
    "Give a synonym and an antonym of '{word}'.": 30,
    "Write one sentence with the word '{word}'.": 30,
    "Use the word '{word}' in a sentence about {animal}.": 90,
    "Name three {kind}.": 40,
    "List five {kind}, separated by commas.": 40,
    "Name one of the {kind} and say one fact about it.": 40,
    "What is the capital of {country}?": 30,
    "Tell me one fact about {country}.": 30,
    "Name a food that comes from {country}.": 30,
    "Which language do people speak in {country}?": 30,
    "List three benefits of {activity}.": 22,
    "Give me one reason for {activity}.": 22,
    "Write a slogan for {activity}.": 22,
    "Is {activity} a good habit? Answer in one sentence.": 22,
    "Give me three short tips to {task}.": 20,
    "What is the first step to {task}?": 20,
    "How can I {task}? Answer in two sentences.": 20,
    "Write a short note to {occasion}.": 15,
    "Write one kind sentence for {occasion}.": 15,
    "Write a short subject line for an email to {occasion}.": 15,
    "Rewrite this more formally: '{casual}'": 16,
    "Correct the spelling and punctuation: '{casual}'": 16,
    "Rewrite in the past tense: '{sentence}'": 12,
    "Turn this into a question: '{sentence}'": 12,
    "Make this sentence negative: '{sentence}'": 12,
    "{name} has {a} {item} and gives away {b}. How many {item} are left?": 110,
    "{name} buys {b} bags with {a} {item} in each. How many {item} is that?": 90,
    "{name} finds {a} {item} and then {b} more. How many {item} does {name} have now?": 90,
    "What is {a} plus {b}?": 64,
    "What is {a} times {b}?": 64,
    "What is {a} minus {b}?": 64,
    "Write two sentences about {animal} {place}.": 120,
    "Write the first line of a story about {animal} {place}.": 90,
    "Give {animal} a name and say why, in one sentence.": 18,
    "Where does {animal} live, and what does it eat?": 18,
    "Write a short slogan for {product}.": 12,
    "Describe {product} in one sentence for a web page.": 12,
    "Suggest a name for {product}.": 12,
}


def compose_prompts(seed: int) -> list[str]:
    """Distinct prompts in a shuffled order: for each template, its number of random fillings."""
    rng = random.Random(seed)
    prompts: list[str] = []
    for template, count in TEMPLATES.items():
        slots = sorted({name for _, name, _, _ in string.Formatter().parse(template) if name})
        fillings = list(product(*(WORDS[slot] for slot in slots)))
        for filling in rng.sample(fillings, min(count, len(fillings))):
            prompts.append(template.format(**dict(zip(slots, filling, strict=True))))
    rng.shuffle(prompts)
    return prompts
