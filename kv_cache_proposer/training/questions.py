"""Questions as people put them to an assistant, made of parts: what is asked, and what about; the same for one seed.

A model that asks itself stays with what it likes to talk about. These begin elsewhere; none is what is evaluated on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

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
    "What is the difference between {} and {}?",
    "Compare {} with {} in a table.",
    "What would the world be like without {}?",
    "Which words does somebody need to know to talk about {}?",
    "Tell me something surprising about {}.",
    "What do people argue about when they argue about {}?",
    "Write the first two paragraphs of an encyclopedia article on {}.",
    "Ask me three questions about {}, one after another, and correct my answers.",
    "How has {} changed in the last fifty years?",
    "Name three professions that have to do with {}, and what they do all day.",
)
_THINGS = (
    "photography", "recycling", "the water cycle", "electric cars", "honey bees", "inflation", "the human heart",
    "solar power", "volcanoes", "the Roman Empire", "jazz", "chess", "meditation", "coral reefs", "public libraries",
    "earthquakes", "the printing press", "remote work", "gravity", "machine learning", "antibiotics", "black holes",
    "cheese making", "the stock market", "tides", "wind turbines", "urban gardens", "marathon running",
    "the periodic table", "migration of birds", "dreams", "plastic", "parliaments", "insurance", "glaciers",
    "typography", "tea",
    "vitamins", "satellites", "democracy", "bridges", "the Silk Road", "comets", "fermentation", "batteries",
    "opera", "the immune system", "mushrooms", "lighthouses", "statistics", "whales", "the Renaissance", "railways",
    "cotton", "sleep", "maps", "elections", "ice ages", "concrete", "the violin", "ants", "deserts", "banks",
    "genes", "pottery", "taxes", "the moon", "rivers", "bicycles", "perfume", "calendars", "the Olympic Games",
    "rainforests", "cameras", "hospitals", "rice", "lightning", "the alphabet", "submarines", "wool", "haiku",
    "search engines", "rainbows", "salt", "the Middle Ages", "airports", "memory", "theatre", "wolves", "soil",
    "encryption", "markets", "clouds", "juggling", "museums", "oil", "kites", "algebra", "trade unions", "bats",
    "dialects", "the French Revolution", "X-rays", "irrigation", "folk music", "robots", "the Sahara", "paper",
    "allergies", "architecture", "video games", "hurricanes", "philosophy", "silver", "postage stamps", "olive oil",
    "lasers", "tourism", "the brain", "castles", "logic", "dinosaurs", "weather forecasts", "chocolate", "courts",
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
    "How do I explain to my parents that {} matters to me?",
    "Make a list of what I should do this week for {}.",
    "I have tried {} three times and failed. What should I change?",
    "What does an expert in {} do that others do not?",
    "Which is better to begin with, {} or {}?",
    "How long does it take until {} becomes a habit?",
    "Write a note to myself that reminds me why {} is good for me.",
    "I am sixty-five years old. Am I too old for {}?",
)
_ACTIVITIES = (
    "learning Spanish", "cooking at home", "running", "drawing portraits", "saving money", "writing a diary",
    "playing the guitar", "speaking in public", "keeping a small flat tidy", "growing tomatoes", "sleeping well",
    "studying for exams", "reading more books", "cycling to work", "baking bread", "working in a team",
    "looking after an old dog", "negotiating a salary", "swimming", "teaching children mathematics", "knitting",
    "learning to code", "yoga", "fishing", "sewing clothes", "keeping bees", "playing the piano", "photographing birds",
    "collecting coins", "dancing tango", "making jam", "repairing a bicycle", "writing short stories", "hiking alone",
    "eating less sugar", "singing in a choir", "building furniture", "learning to type fast", "planning a wedding",
    "moving to another city", "training a puppy", "volunteering", "carving wood", "making friends after thirty",
    "studying law", "investing a little money", "painting walls", "preparing a speech", "growing herbs", "rowing",
    "getting up early", "spending less time on the phone", "organising a small library", "camping with children",
    "learning Japanese", "making cheese", "starting a band", "working from a train", "playing chess", "pottery",
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
    "Write a song with two verses and a chorus about {}.",
    "Write a short play with three people and {}.",
    "Write a speech that a mayor gives about {}.",
    "Write a diary entry of somebody who has just found {}.",
    "Write a letter of complaint about {}.",
    "Explain why {} would make a good subject for a painting.",
    "Tell a story for small children about {} and {}.",
    "Write a news report about {}.",
    "Invent a riddle whose answer is {}.",
)
_SCENES = (
    "a broken umbrella", "the last train home", "a village under snow", "an old piano", "two brothers and a boat",
    "a robot that learns to paint", "a market in the rain", "a lost key", "a garden on the moon",
    "a dragon who is afraid of fire", "an island without clocks", "a letter that arrives too late", "an office chair",
    "a night in the desert", "a baker who cannot taste", "the smallest shop in town", "a cancelled meeting",
    "a lamp that never goes out", "two sisters and a secret", "a ship in the fog", "a teacher on the last day",
    "a city under water", "the first spring morning", "a thief who returns what he took", "a house with one window",
    "an astronaut and a spider", "a forgotten birthday", "a fox in the supermarket", "a bridge that nobody crosses",
    "a wedding in the wrong town", "a machine that tells the truth", "a café at four in the morning", "a tall tree",
    "a king without a country", "a chess game by post", "the quietest room in the world", "a painter and her shadow",
    "a suitcase full of seeds", "a storm at sea", "a mountain that moves", "an orchestra of cats", "a stolen recipe",
    "a child who collects sounds", "the oldest tortoise", "a window cleaner", "a river that runs backwards",
    "a detective who is afraid of the dark", "a postcard without a sender", "a night train to the coast",
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
    "merges two sorted lists", "counts the vowels of a word", "turns a Roman numeral into a number", "shuffles cards",
    "prints the multiplication table", "finds all files with a given ending", "computes compound interest",
    "rotates a matrix", "checks whether two words are anagrams", "splits a bill between friends", "parses a CSV line",
    "keeps the ten largest numbers of a stream", "finds the shortest path in a maze", "turns text into title case",
    "plays tic-tac-toe", "computes the distance of two points", "writes a log file", "counts down to a date",
    "converts binary numbers to decimal", "checks balanced brackets", "finds duplicates in a folder",
    "simulates throwing two dice", "keeps a list of tasks", "downloads a page and counts its links", "sums the digits",
)  # fmt: skip
_TEXT = (
    "Summarise this in one sentence: {} {} {}",
    "Correct the grammar and the style of this text: {} {} {}",
    "Make a list of the main points: {} {} {}",
    "Rewrite this so that it sounds friendlier: {} {} {}",
    "Write a headline for this text: {} {} {}",
    "What questions does this text leave open? {} {} {}",
    "Translate this into French: {} {} {}",
    "Make this text half as long: {} {} {}",
    "Turn this into a short dialogue: {} {} {}",
    "Which of these sentences does not belong to the others, and why? {} {} {}",
    "Continue this text with two more sentences: {} {} {}",
)
_SENTENCES = (
    "The bus was late again, so the children walked.", "Sales rose by four percent, mostly in the north.",
    "We have received your order and will send it on Monday.", "The museum closes early in winter.",
    "Nobody could say who had left the window open.", "The committee will meet again in March.",
    "Rain is expected in the afternoon, and wind at night.", "Our team has grown from three people to eleven.",
    "The recipe needs less sugar than you think.", "The old bridge will be repaired next year.",
    "Please do not forget to bring your passport.", "The new update has fixed most of the problems.",
    "The lift has been out of order since Tuesday.", "Three students from the school won a prize.",
    "The price of coffee has doubled within two years.", "She opened the letter and began to laugh.",
    "The new library has room for forty thousand books.", "Most of the guests left before midnight.",
    "The garden behind the house is open to everybody.", "A small fire broke out in the kitchen.",
    "The train to the airport leaves every ten minutes.", "He had never seen so many birds at once.",
    "The city wants to plant five hundred trees.", "Our office moves to the second floor in May.",
    "The doctor told him to walk more and worry less.", "The film is too long, but the music is wonderful.",
    "Customers can return the shoes within thirty days.", "The river has not been this low for a century.",
)  # fmt: skip
_NUMBERS = (
    "What is {} plus {}? Explain each step.",
    "A shop sells {} apples a day. How many does it sell in {} days?",
    "I drive {} kilometres in {} hours. How fast am I?",
    "Divide {} by {} and round the result to two places.",
    "A shirt costs {} euros and is reduced by {} percent. What does it cost now?",
    "A room holds {} people. How many rooms do {} groups of nine need?",
    "I save {} euros a month. How much is that after {} months?",
    "Is {} a multiple of {}? Show how you know.",
)
_LISTS = (
    "List ten {} and say one sentence about each.",
    "Which {} would you recommend to a beginner?",
    "Sort these into groups and explain why: {}, {}, {}, {}.",
    "Give me five unusual {}.",
    "What do all {} have in common?",
)
_GROUPS = (
    "vegetables", "musical instruments", "board games", "rivers of Europe", "trees", "inventions", "kinds of dance",
    "soups", "tools", "classic novels", "birds", "programming languages", "sports without a ball", "breakfasts",
    "jobs in a hospital", "islands", "spices", "languages of Asia", "kinds of cloud", "fairy tales", "fabrics",
    "famous paintings", "desserts", "insects", "winter sports", "capitals of Africa", "hobbies", "minerals", "fruits",
)  # fmt: skip
_ROLES = (
    "a nurse who works at night", "a retired engineer", "a student in my first year", "the owner of a small bakery",
    "a father of twins", "a teacher of geography", "a bus driver", "new in this country", "a freelance designer",
    "the treasurer of a sports club", "a farmer with forty sheep", "a shy person", "the youngest in my team",
    "a musician without an income", "a manager of six people", "a grandmother of five", "an apprentice carpenter",
)  # fmt: skip
_TROUBLES = (
    "my neighbour plays the drums on Sundays", "I never have time for breakfast", "a customer does not pay",
    "I forget the names of people", "my computer has become slow", "I have been offered a job abroad",
    "my daughter wants to leave school", "I cannot decide what to read", "somebody dented my car",
    "our meetings take too long", "I sleep badly before exams", "my plants keep dying", "I have to cut my expenses",
    "a friend has stopped answering my messages", "I want to write a book", "I promised more than I can do",
    "the roof of my shed leaks", "I have inherited a piano", "nobody reads my reports", "I get lost everywhere",
)  # fmt: skip
_WISHES = (
    "What should I do?", "What would you say to that?", "Give me three options.", "Write a polite message for me.",
    "Make a plan in five steps.", "What should I avoid?", "Where do I begin?", "Ask me what you need to know.",
)  # fmt: skip


def questions(seed: int) -> Iterator[str]:
    """Without end; a question may come again."""
    rng = random.Random(seed)
    while True:
        kind = rng.randrange(8)
        if kind == 0:
            yield _filled(rng, _KNOWLEDGE, _THINGS)
        elif kind == 1:
            yield _filled(rng, _ADVICE, _ACTIVITIES)
        elif kind == 2:
            yield _filled(rng, _WRITING, _SCENES)
        elif kind == 3:
            yield rng.choice(_CODE).format(rng.choice(_LANGUAGES), rng.choice(_TASKS))
        elif kind == 4:
            yield _filled(rng, _TEXT, _SENTENCES)
        elif kind == 5:
            yield rng.choice(_NUMBERS).format(rng.randint(10, 900), rng.randint(2, 40))
        elif kind == 6:
            yield _filled(rng, _LISTS, _GROUPS)
        else:
            yield f"I am {rng.choice(_ROLES)}, and {rng.choice(_TROUBLES)}. {rng.choice(_WISHES)}"


def _filled(rng: random.Random, patterns: Sequence[str], parts: Sequence[str]) -> str:
    """One of the patterns, with a part of its own in each of its gaps."""
    pattern = rng.choice(patterns)
    return pattern.format(*rng.sample(parts, pattern.count("{}")))
