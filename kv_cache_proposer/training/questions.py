"""Questions as people put them to an assistant, made of parts: what is asked, and what about; the same for one seed.

A model that asks itself stays with what it likes to talk about. These begin elsewhere; none is what is evaluated on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_KNOWLEDGE = (
    "How does {} work?",
    "Explain {} to a twelve-year-old.",
    "What are the main advantages and disadvantages of {}?",
    "Give me a short history of {}.",
    "What are common misunderstandings about {}?",
    "Write an introduction to {} in three paragraphs.",
    "I have to give a talk about {}. Give me an outline.",
    "List five important facts about {}.",
    "Why is {} important? Answer in two sentences.",
    "Who should care about {}, and why?",
    "What should I read first if I want to understand {}?",
    "Write a quiz with four questions about {}, with the answers.",
)
_THINGS = (
    "photography", "recycling", "the water cycle", "electric cars", "honey bees", "inflation", "the human heart",
    "solar power", "volcanoes", "the Roman Empire", "jazz", "chess", "meditation", "coral reefs", "public libraries",
    "earthquakes", "the printing press", "remote work", "gravity", "machine learning", "antibiotics", "black holes",
    "cheese making", "the stock market", "tides", "wind turbines", "urban gardens", "marathon running",
    "the periodic table", "migration of birds", "dreams", "plastic", "parliaments", "insurance", "glaciers",
    "typography", "tea",
)  # fmt: skip
_ADVICE = (
    "How can I get better at {}?",
    "Give me ten tips for {}.",
    "I have only twenty minutes a day for {}. Make me a plan for a month.",
    "What mistakes do beginners make when they start {}?",
    "What do I need to buy for {}, and what does it cost?",
    "My friend wants to start {}. What would you tell her?",
    "I have lost interest in {}. How do I find it again?",
    "Is {} worth the effort? Be honest.",
)
_ACTIVITIES = (
    "learning Spanish", "cooking at home", "running", "drawing portraits", "saving money", "writing a diary",
    "playing the guitar", "speaking in public", "keeping a small flat tidy", "growing tomatoes", "sleeping well",
    "studying for exams", "reading more books", "cycling to work", "baking bread", "working in a team",
    "looking after an old dog", "negotiating a salary", "swimming", "teaching children mathematics", "knitting",
)  # fmt: skip
_WRITING = (
    "Write a short poem about {}.",
    "Write the first page of a story about {}.",
    "Write a dialogue between two people who disagree about {}.",
    "Describe {} so that a reader can see it.",
    "Write a funny advertisement for {}.",
    "Write a fairy tale about {} with a surprising end.",
    "Write an e-mail to a colleague about {}.",
    "Write a product review of {}.",
    "Suggest seven titles for a novel about {}.",
)
_SCENES = (
    "a broken umbrella", "the last train home", "a village under snow", "an old piano", "two brothers and a boat",
    "a robot that learns to paint", "a market in the rain", "a lost key", "a garden on the moon",
    "a dragon who is afraid of fire", "an island without clocks", "a letter that arrives too late", "an office chair",
    "a night in the desert", "a baker who cannot taste", "the smallest shop in town", "a cancelled meeting",
)  # fmt: skip
_CODE = (
    "Write a {} function that {}.",
    "Write a {} function that {}, and explain how it works.",
    "Write a {} program that {}. Add comments.",
    "How would you write a {} function that {}? Show an example of its use.",
    "Write {} code that {}, then write tests for it.",
)
_LANGUAGES = ("Python", "Python", "Python", "Java", "C", "Go", "TypeScript", "Rust")
_TASKS = (
    "reverses a string", "checks whether a word is a palindrome", "counts the words of a text",
    "computes the greatest common divisor of two numbers", "finds the largest number of a list", "sorts names",
    "reads a file line by line", "converts Celsius to Fahrenheit", "removes duplicates from a list",
    "checks whether a number is prime", "computes Fibonacci numbers", "finds the most frequent letter of a text",
    "adds two matrices", "validates an e-mail address", "generates a random password", "computes the median",
    "searches a sorted list", "groups words by their first letter", "parses a date", "draws a triangle of stars",
)  # fmt: skip
_TEXT = (
    "Summarise this in one sentence: {} {} {}",
    "Correct the grammar and the style of this text: {} {} {}",
    "Make a list of the main points: {} {} {}",
    "Rewrite this so that it sounds friendlier: {} {} {}",
    "Write a headline for this text: {} {} {}",
    "What questions does this text leave open? {} {} {}",
)
_SENTENCES = (
    "The bus was late again, so the children walked.", "Sales rose by four percent, mostly in the north.",
    "We have received your order and will send it on Monday.", "The museum closes early in winter.",
    "Nobody could say who had left the window open.", "The committee will meet again in March.",
    "Rain is expected in the afternoon, and wind at night.", "Our team has grown from three people to eleven.",
    "The recipe needs less sugar than you think.", "The old bridge will be repaired next year.",
    "Please do not forget to bring your passport.", "The new update has fixed most of the problems.",
)  # fmt: skip
_NUMBERS = (
    "What is {} plus {}? Explain each step.",
    "A shop sells {} apples a day. How many does it sell in {} days?",
    "I drive {} kilometres in {} hours. How fast am I?",
    "Divide {} by {} and round the result to two places.",
)


def questions(seed: int) -> Iterator[str]:
    """Without end; a question may come again."""
    rng = random.Random(seed)
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            yield rng.choice(_KNOWLEDGE).format(rng.choice(_THINGS))
        elif kind == 1:
            yield rng.choice(_ADVICE).format(rng.choice(_ACTIVITIES))
        elif kind == 2:
            yield rng.choice(_WRITING).format(rng.choice(_SCENES))
        elif kind == 3:
            yield rng.choice(_CODE).format(rng.choice(_LANGUAGES), rng.choice(_TASKS))
        elif kind == 4:
            yield rng.choice(_TEXT).format(*rng.sample(_SENTENCES, 3))
        else:
            yield rng.choice(_NUMBERS).format(rng.randint(10, 900), rng.randint(2, 40))
