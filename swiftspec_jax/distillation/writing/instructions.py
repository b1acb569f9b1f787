"""Wordings of prompts: tasks over a document, openings of user turns, sums."""

import dataclasses

import numpy as np

LANGUAGES = (
  'French', 'German', 'Spanish', 'Italian', 'Portuguese', 'Dutch', 'Russian',
  'Chinese', 'Japanese', 'Polish', 'Swedish', 'Latin',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
  """One kind of task over a document.

  Attributes:
    kind: name, stored with the samples.
    weight: frequency, relative to the other kinds.
    limit: most tokens of an answer.
    wordings: texts of the instruction; {language}, {count} and {word} are
      filled in.
  """

  kind: str
  weight: float
  limit: int
  wordings: tuple[str, ...]


TASKS = (
  Task(
    'summarize',
    3,
    160,
    (
      'Summarize the text above.',
      'Summarize this.',
      'Please summarise the passage in {count} sentences.',
      'Give a short summary of the text.',
      'Write a brief summary of the article.',
      'TL;DR',
      'What is this text about?',
      'What are the {count} most important points?',
      'List the key points of the text as bullets.',
      'Condense the text to one paragraph.',
      'Summarize the following text: (see above)',
      'Can you sum up the main idea for a busy reader?',
      'Write a headline and a two-sentence summary.',
      'Explain in simple words what the text says.',
      'Write an abstract of the text in at most {count}0 words.',
      'Produce a concise summary, keeping all the facts.',
    ),
  ),
  Task(
    'translate',
    3,
    160,
    (
      'Translate the text to {language}.',
      'Translate this into {language}.',
      'Translate the above from English to {language}.',
      'Please give me a {language} translation of the passage.',
      'How would you say this in {language}?',
      'Render the first paragraph in {language}.',
      'Translate the first {count} sentences into {language}.',
      'Write this in {language}, please.',
      'English to {language} translation:',
      'Translate English to {language}.',
      'Translate this into English.',
      'Translate {language} to English:',
      'What does this mean in English?',
      'I need the last sentence in {language}.',
    ),
  ),
  Task(
    'answer',
    4,
    120,
    (
      'Answer from the text: what does it say about {word}?',
      'Based on the text above, what is {word}?',
      'Using only the passage, explain how {word} is used.',
      'According to the text, why does {word} matter?',
      'Question: What is the main purpose described here? Answer:',
      'Who is this written for, according to the text?',
      'Given the context above, answer the question: what happens with {word}?',
      'Use the information above to answer: when should one use {word}?',
      'Question: how does {word} relate to the rest? Answer in one sentence.',
      'What does the author recommend?',
      'What are the requirements mentioned in the text?',
      'Is {word} mentioned? If so, say what the text says about it.',
      'Which problem is solved here, and how?',
      'Write a question about the text and answer it.',
      'Write {count} questions with answers about the text.',
      'True or false: the text is about {word}. Explain.',
    ),
  ),
  Task(
    'extract',
    2,
    140,
    (
      'Extract all names from the text.',
      'List all numbers and dates that occur, as JSON.',
      'Extract the keywords of the text as a comma-separated list.',
      'Make a table of the terms and their meaning.',
      'Return a JSON object with the keys "title", "topic" and "summary".',
      'Copy the sentence that mentions {word}.',
      'Quote the most important sentence of the text.',
      'Which organisations, people or places are named?',
      'List the steps described in the text.',
      'Extract {count} facts from the passage.',
      'Find all the technical terms and list them.',
      'Pull out any links, file names or commands.',
    ),
  ),
  Task(
    'rewrite',
    2,
    160,
    (
      'Rewrite the text in a friendlier tone.',
      'Rewrite this more formally.',
      'Paraphrase the passage.',
      'Correct the spelling and grammar of the text.',
      'Make the text shorter without losing content.',
      'Rewrite it for a ten-year-old child.',
      'Turn the text into an email to a colleague.',
      'Turn it into a bulleted list.',
      'Rewrite the first paragraph in the past tense.',
      'Improve the style of the text.',
      'Rewrite the text as a dialogue between two people.',
      'Repeat the text, replacing "{word}" by "thing".',
      'Repeat the text above word for word.',
    ),
  ),
  Task(
    'continue',
    2,
    160,
    (
      'Continue the text.',
      'Write the next paragraph.',
      'What could come next? Go on in the same style.',
      'Finish the text.',
      'Add a conclusion.',
      'Write an introduction for it.',
      'Add a section about {word}.',
    ),
  ),
  Task(
    'code',
    1,
    160,
    (
      'Fix the mistakes in the code, if there are any.',
      'Explain the code line by line.',
      'Write a Python function for what is described here.',
      'Write a unit test for this.',
      'Add comments and a docstring.',
      'Give an example of how to use it in Python.',
      'Rewrite the code so that it is easier to read.',
      'Complete the code.',
      'What does the code do, and what is its complexity?',
    ),
  ),
)

LEAD_INS = (
  '{task}\n\n',
  '{task}\n\nText:\n',
  '{task}\n"""\n',
  'Read the following text. {task}\n\n',
  'Context:\n',
  'Here is a text:\n\n',
  'I found this:\n\n',
)

ADDENDA = (
  '',
  '\n\nKeep it short.',
  '\n\nBe precise.',
  '\n\nExplain your answer.',
  '\n\nAnswer in one sentence.',
  '\n\nUse your own words.',
  '\n\nThank you!',
  '\n"""',
  '\n\nAnswer:',
  '\n\nMake it sound exciting.',
  '\n\nUse simple language.',
  '\n\nAnswer in {language}.',
  '\n\nThink step by step.',
)

FOLLOW_UPS = (
  'Thanks! Can you say that in {language}?',
  'Make it shorter.',
  'Can you give an example?',
  'Why?',
  'Explain this in more detail.',
  'Now rewrite it as a list.',
  'Are you sure? Check your answer.',
  'What is the most important point?',
  'Write that as a poem.',
  'And what about {word}?',
  'Rewrite your answer for a child.',
  'Summarize your answer in one sentence.',
  'Translate your answer to {language}.',
  'Can you make it more formal?',
  'Continue.',
)

SYSTEM_PROMPTS = (
  'You are a helpful assistant.',
  'You are an expert who answers briefly and precisely.',
  'You are a friendly teacher.',
  'You are a careful translator and writer.',
  'Answer the question of the user.',
)

# What a user turn begins with; the model goes on from there.
OPENINGS = (
  '', '', '', '', '',
  'What is {word}', 'What are the', 'How do I', 'How does {word}', 'Why do',
  'Why is {word}', 'Who was', 'Who wrote', 'When did', 'Where is',
  'Which country', 'How many', 'How long does it take to', 'Is it true that',
  'Can you explain {word}', 'Explain the difference between',
  'Explain {topic} to', 'Tell me about {topic}', 'Give me {count} tips for',
  'Give an example of', 'List {count}', 'Name {count}', 'Compare',
  'Write a story about {topic}', 'Write a poem about {topic}',
  'Write an essay on {topic}', 'Write a letter to', 'Write an email to',
  'Write a blog post about {topic}', 'Write a product description for',
  'Write a short scene in which', 'Write a speech about {topic}',
  'Compose a song about {topic}', 'Draft a plan for', 'Design a',
  'Imagine you are', 'Pretend to be', 'You are a {topic} expert.',
  'Act as a', 'Let us play a game:', 'Describe a day in the life of',
  'Write a Python function that', 'Write a program that', 'Write a SQL query',
  'Write a regular expression', 'Implement', 'Fix the bug in this code:\n',
  'What does this code do?\n', 'How can I sort', 'Write HTML for',
  'Write a bash command that', 'Explain this error:',
  'Solve the equation', 'Calculate', 'If a', 'A train', 'Suppose that',
  'There are {count}', 'Prove that', 'What is the probability',
  'Find the derivative of', 'A rectangle has', 'Tom has {count}',
  'Here is a paragraph:', 'Extract the names from:', 'Summarize: {city} -',
  'Summarize the following article:\n\n{city} -',
  'Summarize the news:\n\nOfficials in {city} said',
  'Summarise this article in three sentences.\n\n({city}) A new',
  'Article: A man from {city}', 'Correct the grammar:',
  'Translate to {language}: The', 'Translate this sentence to {language}:',
  'Translate {language} to English:',
  'Translate the following {language} sentence into English:\n',
  'Translate from English to {language}: "I', 'How do you say',
  'Classify the following', 'Rewrite this sentence:', 'Give a synonym of',
  'Context: The {topic}', 'Context: In {year}, ',
  'Use the passage to answer.\nPassage: The {topic}',
  'Answer the question from the context.\nContext: {city} is',
  'What happened in {year}', 'Who is the president of', 'Recommend a book',
  'I feel', 'My friend', 'I want to learn', 'I am planning a trip to {city}',
  'Should I', 'What would happen if', 'Help me', 'Discuss {topic}',
  'What are the pros and cons of', 'What caused', 'Describe how',
  'Outline', 'Create a recipe', 'Create a workout', 'Create a quiz about',
  'Convert', 'Arrange', 'Complete the sentence:', 'Once upon a time',
  'Evaluate the following', 'Analyse the data:', 'Return JSON for',
)  # fmt: skip

TOPICS = (
  'the ocean', 'photosynthesis', 'gravity', 'democracy', 'jazz', 'the moon',
  'climate change', 'chess', 'coffee', 'the Roman Empire', 'bees', 'volcanoes',
  'black holes', 'evolution', 'inflation', 'supply and demand', 'robots',
  'artificial intelligence', 'friendship', 'winter', 'a lost dog', 'a dragon',
  'a lighthouse', 'cooking', 'football', 'gardening', 'the Renaissance',
  'electricity', 'vaccines', 'the human heart', 'DNA', 'antibiotics',
  'renewable energy', 'space travel', 'poetry', 'theatre', 'painting',
  'the French Revolution', 'trade', 'ethics', 'free will', 'logic', 'sleep',
  'memory', 'language', 'bicycles', 'airplanes', 'bridges', 'earthquakes',
  'rain forests', 'deserts', 'whales', 'dinosaurs', 'computers', 'databases',
  'networks', 'operating systems', 'recursion', 'sorting', 'prime numbers',
  'geometry', 'statistics', 'fractions', 'money', 'banks', 'taxes', 'startups',
  'marketing', 'job interviews', 'parenting', 'travel', 'fashion', 'music',
  'film', 'photography', 'history', 'religion', 'law', 'medicine', 'nutrition',
  'yoga', 'running', 'cities', 'farming', 'water', 'plastic', 'recycling',
  'schools', 'universities', 'libraries', 'museums', 'the internet', 'privacy',
)  # fmt: skip

CITIES = (
  'London', 'Paris', 'New York', 'Tokyo', 'Berlin', 'Rome', 'Cairo', 'Sydney',
  'Chicago', 'Boston', 'Madrid', 'Delhi', 'Lagos', 'Toronto', 'Moscow',
  'Beijing', 'Texas', 'California', 'Washington', 'Nairobi', 'Oslo', 'Lima',
)  # fmt: skip

_NAMES = (
  'Anna', 'Ben', 'Carla', 'David', 'Emma', 'Frank', 'Grace', 'Henry', 'Ida',
  'Jack', 'Kate', 'Liam', 'Maria', 'Noah', 'Olivia', 'Peter', 'Rosa', 'Sam',
)  # fmt: skip
_THINGS = (
  'apples', 'books', 'marbles', 'stickers', 'cookies', 'pencils', 'cards',
  'shells', 'tickets', 'eggs', 'flowers', 'coins', 'oranges', 'toys', 'cups',
)  # fmt: skip
_SUMS = (
  '{name} has {a} {things}. {other} gives {name} {b} more. How many {things} '
  'does {name} have now?',
  '{name} buys {a} {things} for ${b} each. How much does {name} pay?',
  '{name} had {c} {things} and gave {a} of them to {other}. How many are left?',
  'A box holds {a} {things}. How many {things} are in {b} boxes?',
  '{name} reads {a} pages a day. How many days does a book of {c} pages take?',
  '{name} earns ${a} an hour and works {b} hours a week for {d} weeks. How '
  'much money does {name} earn?',
  'What is {a} + {b}?',
  'What is {c} - {a}?',
  'Calculate {a} * {b}.',
  'Compute {a} + {b} * {d}. Explain step by step.',
  'Solve for x: {d}x + {a} = {c}.',
  'A car drives {a} miles in {d} hours. What is its average speed?',
  'A rectangle is {a} cm long and {b} cm wide. What are its area and its '
  'perimeter?',
  'What is {b}% of {c}?',
  '{name} and {other} share {c} {things} equally. {name} then loses {d}. How '
  'many does {name} have?',
  '{name} is {a} years old. {other} is {d} years older. How old will {other} '
  'be in {b} years?',
  'Every day {name} bakes {a} {things} and sells {d} of them for ${b} each. '
  'How much does {name} earn in a week?',
  'There are {a} {things} on the table and twice as many in the box. {other} '
  'takes {d}. How many {things} are there in total?',
)


def fill(wording: str, rng: np.random.Generator, word: str) -> str:
  """Returns a wording with its placeholders filled in."""
  return (
    wording.replace('{language}', pick(rng, LANGUAGES))
    .replace('{topic}', pick(rng, TOPICS))
    .replace('{city}', pick(rng, CITIES))
    .replace('{count}', str(rng.integers(2, 8)))
    .replace('{year}', str(rng.integers(1850, 2024)))
    .replace('{word}', word)
  )


def pick(rng: np.random.Generator, values: tuple[str, ...]) -> str:
  """Returns one of the values."""
  return values[rng.integers(len(values))]


def draw_task(rng: np.random.Generator) -> Task:
  """Returns a kind of task, by weight."""
  weights = np.array([task.weight for task in TASKS])
  return TASKS[rng.choice(len(TASKS), p=weights / weights.sum())]


def word_problem(rng: np.random.Generator) -> str:
  """Returns a sum in words with numbers drawn at random."""
  small, large = rng.integers(2, 13, 2), rng.integers(2, 100, 2)
  name, other = rng.choice(len(_NAMES), 2, replace=False)
  numbers = sorted(int(number) for number in (*large, small[0]))
  return pick(rng, _SUMS).format(
    name=_NAMES[name],
    other=_NAMES[other],
    things=pick(rng, _THINGS),
    a=numbers[1],
    b=int(small[1]),
    c=numbers[1] + numbers[2] * int(rng.integers(1, 6)),
    d=numbers[0],
  )
