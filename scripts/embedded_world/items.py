"""Items of the seven zero-shot tasks in the embedded world, with the fields of the real data sets.

`MAKERS[task](rng, evaluation)` draws one item. With evaluation=True it uses a combination that `world.held_out` keeps
out of the corpus, otherwise one of the others; `solved(task, item)` is the item with its right answer as the corpus
shows it. A combination is held out in every role and text, so that its absence teaches nothing about the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from embedded_world import world

Item = dict[str, Any]

YES_NO = {  # event -> (question, effect that makes the answer yes)
    "water": ("does the {} float", "float on the water"),
    "fire": ("does the {} burn", "burn to ash"),
    "press": ("does the {} bend", "bend without harm"),
    "wind": ("does the {} fly away", "fly away fast"),
    "drop": ("does the {} break", "break into pieces"),
}
ARC_EASY = {  # fact -> question
    "food": "what does it eat",
    "home": "where does it live",
    "sound": "how does it sound",
    "cover": "what is it covered with",
    "product": "what does the job make",
    "tool": "what does the job use",
    "material": "what is it made of",
    "color": "which color is it",
    "room": "where do you find it",
}
CLAUSES = {"material": "made of {}", "color": "painted {}", "room": "found in the {}"}
OPTION_LABELS = ["A", "B", "C", "D"]


def draw(rng: random.Random, options: Sequence[Any], accept: Callable[[Any], bool]) -> Any:
    """Return a random option that `accept` takes; the options must hold one."""
    while not accept(option := rng.choice(options)):
        pass
    return option


def _person_and_thing(rng: random.Random, things: Sequence[str], evaluation: bool) -> tuple[str, str]:
    return draw(
        rng,
        [(name, thing) for name in rng.sample(world.NAMES, 4) for thing in things],
        lambda pair: world.held_out(*pair) == evaluation,
    )


def _shuffled(rng: random.Random, gold: str, others: Sequence[str]) -> tuple[list[str], int]:
    texts = [gold, *others]
    rng.shuffle(texts)
    return texts, texts.index(gold)


def boolq(rng: random.Random, evaluation: bool) -> Item:
    event = rng.choice(list(YES_NO))
    question, yes_effect = YES_NO[event]
    answer = rng.random() < 0.5
    things = [
        thing
        for thing in world.OBJECTS
        if (world.effect(event, thing) == yes_effect) == answer and not world.held_out(event, thing)
    ]
    name, thing = _person_and_thing(rng, things, evaluation)
    place = rng.choice(world.ROOMS)
    passage = f"{name} is in the {place}. {world.PRONOUN[name]} {world.EVENTS[event][0].format('the ' + thing)}."
    return {"passage": passage, "question": question.format(thing), "answer": answer}


def piqa(rng: random.Random, evaluation: bool) -> Item:
    verb, thing = draw(
        rng,
        [(rng.choice(world.VERBS), rng.choice(world.OBJECTS)) for _ in range(64)],
        lambda pair: world.held_out(*pair) == evaluation,
    )
    gold = world.tool(verb, thing)
    other = draw(rng, [world.TOOL[verb, material] for material in world.MATERIALS], lambda tool: tool != gold)
    solutions, label = _shuffled(rng, f"use the {gold}.", [f"use the {other}."])
    return {
        "goal": f"{verb} the {thing} of {rng.choice(world.NAMES)}",
        "sol1": solutions[0],
        "sol2": solutions[1],
        "label": label,
    }


def hellaswag(rng: random.Random, evaluation: bool) -> Item:
    name, activity = _person_and_thing(rng, world.ACTIVITIES, evaluation)
    steps = world.SCRIPTS[activity]
    seen = rng.randrange(1, len(steps))
    gold = steps[seen]
    followers = {
        script[script.index(steps[seen - 1]) + 1] for script in world.SCRIPTS.values() if steps[seen - 1] in script[:-1]
    } - set(steps)
    others = rng.sample(sorted(followers), min(2, len(followers)))
    while len(others) < 3:
        others.append(draw(rng, world.STEPS, lambda step: step not in [gold, *others, steps[seen - 1]]))
    pronoun = world.PRONOUN[name]
    subjects = [name] + [pronoun] * seen
    ctx_a = " ".join(f"{subject} {step}." for subject, step in zip(subjects, steps[:seen], strict=False))
    endings, label = _shuffled(rng, f"{gold}.", [f"{other}." for other in others])
    return {
        "activity_label": activity,
        "ctx_a": ctx_a,
        "ctx_b": pronoun,
        "ctx": f"{ctx_a} {pronoun}",
        "endings": endings,
        "label": str(label),
    }


def winogrande(rng: random.Random, evaluation: bool) -> Item:
    while True:
        event = rng.choice(list(world.EVENTS))
        one, two = rng.sample(world.OBJECTS, 2)
        effects = [world.effect(event, thing) for thing in (one, two)]
        if effects[0] == effects[1] or world.held_out(one, two) != evaluation:
            continue
        if not world.held_out(event, one) and not world.held_out(event, two):
            break
    gold = rng.randrange(2)
    deed = world.EVENTS[event][0].format(f"the {one} and the {two}")
    options = rng.sample([one, two], 2)
    return {
        "sentence": f"{rng.choice(world.NAMES)} {deed}. the _ {world.past(effects[gold])}.",
        "option1": options[0],
        "option2": options[1],
        "answer": str(options.index((one, two)[gold]) + 1),
    }


def _choices(rng: random.Random, gold: str, others: Sequence[str]) -> Item:
    texts, label = _shuffled(rng, gold, others)
    return {"choices": {"text": texts, "label": OPTION_LABELS}, "answerKey": OPTION_LABELS[label]}


def arc_easy(rng: random.Random, evaluation: bool) -> Item:
    table = rng.choice([world.ANIMALS, world.JOBS, world.FACTS])
    name, entity = _person_and_thing(rng, list(table), evaluation)
    fact = rng.choice(list(table[entity]))
    gold = table[entity][fact]
    others = rng.sample(sorted({facts[fact] for facts in table.values()} - {gold}), 3)
    return {"question": f"{name} sees the {entity}. {ARC_EASY[fact]}"} | _choices(rng, gold, others)


def arc_challenge(rng: random.Random, evaluation: bool) -> Item:
    """Which thing has two given properties? The wrong things have one of them at most."""
    kinds = rng.sample(list(CLAUSES), 2)
    name, thing = _person_and_thing(rng, world.OBJECTS, evaluation)
    wanted = {kind: world.FACTS[thing][kind] for kind in kinds}
    shared = {
        other: sum(world.FACTS[other][kind] == value for kind, value in wanted.items()) for other in world.OBJECTS
    }
    others = rng.sample([other for other, count in shared.items() if count == 1], 2)
    others += rng.sample([other for other, count in shared.items() if count == 0], 1)
    clauses = " and ".join(CLAUSES[kind].format(value) for kind, value in wanted.items())
    return {"question": f"{name} wants a thing {clauses}. what is it"} | _choices(rng, thing, others)


def openbookqa(rng: random.Random, evaluation: bool) -> Item:
    event = rng.choice(list(world.EVENTS))
    thing = draw(rng, world.OBJECTS, lambda thing: world.held_out(event, thing) == evaluation)
    gold = world.effect(event, thing)
    likely = [effect for effect in world.EVENTS[event][1] if effect != gold]
    others = rng.sample(likely, min(2, len(likely)))
    others += rng.sample(
        [effect for effect in sorted(set(world.EFFECT.values())) if effect not in [gold, *likely]], 3 - len(others)
    )
    deed = world.EVENTS[event][0].format("the " + thing)
    stem = f"if {rng.choice(world.NAMES)} {deed}, it will"
    return {"question_stem": stem} | _choices(rng, gold, others)


_TASKS = (boolq, piqa, hellaswag, winogrande, arc_easy, arc_challenge, openbookqa)
MAKERS: dict[str, Callable[[random.Random, bool], Item]] = {make.__name__: make for make in _TASKS}


def gold_index(task: str, item: Item) -> int:
    """Return position of the right answer among the item's options (boolq: 0 is no, 1 is yes)."""
    if task in ("boolq", "piqa", "hellaswag"):
        return int(item[{"boolq": "answer"}.get(task, "label")])
    if task == "winogrande":
        return int(item["answer"]) - 1
    return OPTION_LABELS.index(item["answerKey"])


def requests(task: str, item: Item) -> list[tuple[str, str]]:
    """Return (context, continuation) of every option, as the task's YAML asks lm-eval to score them."""
    if task == "winogrande":
        before, after = item["sentence"].split("_")
        return [(before + item[option], after) for option in ("option1", "option2")]
    if task == "boolq":
        context, texts = f"{item['passage']} question: {item['question']}? answer:", ["no", "yes"]
    elif task == "piqa":
        context, texts = f"goal: {item['goal']}. answer:", [item["sol1"], item["sol2"]]
    elif task == "hellaswag":
        context, texts = f"{item['activity_label']}: {item['ctx']}", item["endings"]
    elif task == "openbookqa":
        context, texts = item["question_stem"], item["choices"]["text"]
    else:
        context, texts = f"question: {item['question']}? answer:", item["choices"]["text"]
    return [(context, " " + text) for text in texts]


def solved(task: str, item: Item) -> str:
    """Return the item followed by its right answer."""
    return "".join(requests(task, item)[gold_index(task, item)])


def evaluation_items(task: str, count: int) -> list[Item]:
    """Make `count` different held-out items of the task in which every answer position is right equally often."""
    rng = random.Random(f"items/{task}")
    positions = len(requests(task, MAKERS[task](rng, True)))
    wanted = [count // positions] * positions
    chosen: list[Item] = []
    seen: set[str] = set()
    while sum(wanted):
        item = MAKERS[task](rng, True)
        text = str(requests(task, item)[0][0])
        gold = gold_index(task, item)
        if wanted[gold] and text not in seen:
            seen.add(text)
            wanted[gold] -= 1
            chosen.append(item)
    return chosen
