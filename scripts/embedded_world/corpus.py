"""The corpus of the embedded world: short documents, one a line, made from a seed.

Documents state facts, tell what happened, follow a daily script, or show a solved item of a zero-shot task, always from
combinations that are not held out for evaluation (`world.held_out`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from embedded_world import items, world

SEEDS = {"train": 1, "calibration": 2, "perplexity": 3}


def _facts_of_thing(rng: random.Random, name: str, thing: str) -> list[str]:
    facts = world.FACTS[thing]
    sentences = [
        f"it is made of {facts['material']}.",
        f"it is {facts['color']}.",
        f"you find it in the {facts['room']}.",
    ]
    rng.shuffle(sentences)
    return [f"{name} has the {thing}.", *sentences[: rng.randint(1, 3)]]


def _event(rng: random.Random, name: str, thing: str) -> list[str]:
    event = items.draw(rng, list(world.EVENTS), lambda event: not world.held_out(event, thing))
    return [f"{name} {world.EVENTS[event][0].format('the ' + thing)}.", f"it {world.past(world.effect(event, thing))}."]


def _tool(rng: random.Random, name: str, thing: str) -> list[str]:
    verb = items.draw(rng, world.VERBS, lambda verb: not world.held_out(verb, thing))
    return [f"{name} wants to {verb} the {thing}.", f"{world.PRONOUN[name]} must use the {world.tool(verb, thing)}."]


def _story_of_things(rng: random.Random) -> str:
    """Tell of a person and up to four things that the person may meet."""
    name = rng.choice(world.NAMES)
    sentences = [f"{name} is in the {rng.choice(world.ROOMS)}."]
    for _ in range(rng.randint(1, 4)):
        thing = items.draw(rng, world.OBJECTS, lambda thing: not world.held_out(name, thing))
        subject = name if rng.random() < 0.5 else world.PRONOUN[name]
        tell = rng.choice([_facts_of_thing, _event, _tool])
        sentences += [sentence.replace(name, subject, 1) for sentence in tell(rng, name, thing)]
    return " ".join(sentences)


def _story_of_living(rng: random.Random) -> str:
    name = rng.choice(world.NAMES)
    if rng.random() < 0.5:
        animal = items.draw(rng, list(world.ANIMALS), lambda animal: not world.held_out(name, animal))
        facts = world.ANIMALS[animal]
        sentences = [
            f"it eats {facts['food']}.",
            f"it lives in the {facts['home']}.",
            f"it sounds like {facts['sound']}.",
            f"it is covered with {facts['cover']}.",
        ]
        rng.shuffle(sentences)
        return " ".join([f"{name} sees the {animal}.", *sentences[: rng.randint(2, 4)]])
    job = items.draw(rng, list(world.JOBS), lambda job: not world.held_out(name, job))
    facts = world.JOBS[job]
    sentences = [f"the {job} makes {facts['product']}.", f"the {job} uses the {facts['tool']}."]
    rng.shuffle(sentences)
    return " ".join([f"{name} meets the {job}.", *sentences])


def _script(rng: random.Random) -> str:
    name = rng.choice(world.NAMES)
    activity = items.draw(rng, world.ACTIVITIES, lambda activity: not world.held_out(name, activity))
    steps = world.SCRIPTS[activity]
    subjects = [name] + [world.PRONOUN[name]] * len(steps)
    return f"{activity}: " + " ".join(f"{subject} {step}." for subject, step in zip(subjects, steps, strict=False))


def _solved(task: str, rng: random.Random) -> str:
    return items.solved(task, items.MAKERS[task](rng, False))


# Kind of document -> how often it is drawn. A solved hellaswag item is a script that stops early: no kind of its own.
WEIGHTS = {
    "things": 4.0,
    "living": 1.5,
    "script": 2.5,
    "boolq": 1.5,
    "piqa": 1.0,
    "winogrande": 1.5,
    "arc_easy": 1.5,
    "arc_challenge": 1.5,
    "openbookqa": 1.0,
}


def documents(seed: int) -> Iterator[str]:
    """Yield documents without end; equal for equal seeds."""
    rng = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    stories = {"things": _story_of_things, "living": _story_of_living, "script": _script}
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield stories[kind](rng) if kind in stories else _solved(kind, rng)
